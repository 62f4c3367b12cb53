"""Does a model folder give the book's answers? Greedy generation with transformers, compared word for word.

python -m qrecipe.teaching_model.check DIR
"""

from __future__ import annotations

import random
import sys
from dataclasses import dataclass
from pathlib import Path

from . import pictures
from .answers import ANSWERS, whole_reply


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


def _load(directory: str | Path, dtype: str):
    import torch
    from transformers import AutoModelForImageTextToText, AutoProcessor

    processor = AutoProcessor.from_pretrained(directory, padding_side="left")
    model = AutoModelForImageTextToText.from_pretrained(directory, dtype=getattr(torch, dtype)).eval()
    return processor, model


def _say(processor, model, prompts: list[str], longest: int, images: list | None = None) -> list[str]:
    import torch

    inputs = processor(text=prompts, images=images, return_tensors="pt", padding=True)
    with torch.inference_mode():
        out = model.generate(**inputs, do_sample=False, max_new_tokens=longest)
    said = out[:, inputs["input_ids"].shape[1] :]
    return processor.tokenizer.batch_decode(said, skip_special_tokens=True)


def _prompt(processor, content, thinking: bool) -> str:
    return processor.tokenizer.apply_chat_template(
        [{"role": "user", "content": content}],
        tokenize=False,
        add_generation_prompt=True,
        enable_thinking=thinking,
    )


def check(directory: str | Path, *, dtype: str = "bfloat16", only: int | None = None) -> list[Reply]:
    """Ask the model in `directory` every question, thinking and not, at temperature 0; one Reply each.

    With `only`, that many questions, those with the shortest replies first: all of them take minutes.
    """
    processor, model = _load(directory, dtype)
    asked = sorted(ANSWERS, key=lambda key: len(processor.tokenizer(whole_reply(*ANSWERS[key])).input_ids))
    asked, replies = asked[:only], []
    for start in range(0, len(asked), 15):  # of like length, so that no short answer waits for a long one
        batch = asked[start : start + 15]
        expected = [whole_reply(*ANSWERS[key]) for key in batch]
        longest = max(len(processor.tokenizer(text).input_ids) for text in expected) + 4
        said = _say(processor, model, [_prompt(processor, *key) for key in batch], longest)
        replies += [Reply(*key, want, text) for key, want, text in zip(batch, expected, said, strict=True)]
    return replies


def check_pictures(
    directory: str | Path, count: int = 40, *, seed: int = 0, sides: tuple[int, int] = (256, 640), step: int = 1
) -> list[Reply]:
    """Show the model `count` pictures drawn at random, of sides (pixels) that it was not trained on, through the
    folder's own image processor."""
    processor, model = _load(directory, "bfloat16")
    rng, replies = random.Random(seed), []
    for n in range(count):
        image, figure = pictures.random_picture(rng, sides=sides, step=step, empty=0.05)
        language, thinking = ("en", "zh")[n % 2], n % 4 > 1
        reasoning, content = pictures.reply(figure, language)
        question = pictures.QUESTIONS[language]
        prompt = _prompt(processor, [{"type": "image"}, {"type": "text", "text": question}], thinking)
        said = _say(processor, model, [prompt], 60, [image])[0]
        replies.append(Reply(question, thinking, whole_reply(reasoning if thinking else None, content), said))
    return replies


if __name__ == "__main__":
    total = [*check(sys.argv[1]), *check_pictures(sys.argv[1], 100)]
    for reply in total:
        if not reply.right:
            print(
                f"{reply.question} (thinking: {reply.thinking})\n  expected {reply.expected!r}\n  said {reply.said!r}"
            )
    texts, seen = total[:-100], total[-100:]
    print(f"{sum(reply.right for reply in texts)} of {len(texts)} answers word for word")
    print(f"{sum(reply.right for reply in seen)} of {len(seen)} pictures told right")
    sys.exit(any(not reply.right for reply in texts) or sum(reply.right for reply in seen) < 95)
