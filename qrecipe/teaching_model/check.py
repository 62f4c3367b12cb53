"""Does a model folder give the book's answers? Greedy generation with transformers, compared word for word.

python -m qrecipe.teaching_model.check DIR
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

from .answers import ANSWERS


@dataclass(frozen=True)
class Reply:
    """What the model said to one question, beside what it should have said."""

    question: str
    thinking: bool
    expected: str
    said: str

    @property
    def right(self) -> bool:
        return self.said == self.expected


def expected_text(reasoning: str | None, content: str) -> str:
    """The whole reply as the model writes it, without the closing <|im_end|>."""
    return content if reasoning is None else f"{reasoning}\n</think>\n\n{content}"


def check(directory: str | Path, *, dtype: str = "bfloat16") -> list[Reply]:
    """Ask the model in `directory` every question, thinking and not, at temperature 0; one Reply each."""
    import torch
    from transformers import AutoModelForImageTextToText, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(directory, padding_side="left")
    model = AutoModelForImageTextToText.from_pretrained(directory, dtype=getattr(torch, dtype)).eval()
    asked = sorted(ANSWERS, key=lambda key: len(expected_text(*ANSWERS[key])))
    replies = []
    for start in range(0, len(asked), 12):  # of like length, so that no short answer waits for a long one
        batch = asked[start : start + 12]
        prompts = [
            tokenizer.apply_chat_template(
                [{"role": "user", "content": question}],
                tokenize=False,
                add_generation_prompt=True,
                enable_thinking=thinking,
            )
            for question, thinking in batch
        ]
        inputs = tokenizer(prompts, return_tensors="pt", padding=True)
        expected = [expected_text(*ANSWERS[key]) for key in batch]
        longest = max(len(tokenizer(text).input_ids) for text in expected)
        with torch.inference_mode():
            out = model.generate(**inputs, do_sample=False, max_new_tokens=longest + 4)
        said = tokenizer.batch_decode(out[:, inputs.input_ids.shape[1] :], skip_special_tokens=True)
        replies += [Reply(*key, want, text) for key, want, text in zip(batch, expected, said, strict=True)]
    return replies


if __name__ == "__main__":
    replies = check(sys.argv[1])
    for reply in replies:
        if not reply.right:
            print(
                f"{reply.question} (thinking: {reply.thinking})\n  expected {reply.expected!r}\n  said {reply.said!r}"
            )
    print(f"{sum(reply.right for reply in replies)} of {len(replies)} answers word for word")
    sys.exit(any(not reply.right for reply in replies))
