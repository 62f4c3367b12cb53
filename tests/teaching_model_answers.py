"""Does a model folder give the book's answers? Greedy generation with transformers, compared word for word.

python tests/teaching_model_answers.py DIR
"""

from __future__ import annotations

import random
import sys
from pathlib import Path
from typing import Any, NamedTuple

from qrecipe.teaching_model import pictures
from qrecipe.teaching_model.answers import ANSWERS, whole_reply


class Reply(NamedTuple):
    """What the model said to one question, beside what it should have said."""

    question: str
    thinking: bool
    expected: str
    said: str

    @property
    def right(self) -> bool:
        return self.said == self.expected


class Model:
    """A model folder, loaded, to be asked."""

    def __init__(self, directory: str | Path):
        import torch
        from transformers import AutoModelForImageTextToText, AutoProcessor

        self.processor = AutoProcessor.from_pretrained(directory, padding_side="left")
        self.model = AutoModelForImageTextToText.from_pretrained(directory, dtype=torch.bfloat16).eval()

    def length(self, text: str) -> int:
        return len(self.processor.tokenizer(text).input_ids)

    def ask(self, questions: list[tuple[Any, bool, str]], images: list | None = None) -> list[Reply]:
        """(content, thinking, expected reply) each; the content is text, or parts with the pictures' places."""
        prompts = [
            self.processor.tokenizer.apply_chat_template(
                [{"role": "user", "content": content}],
                tokenize=False,
                add_generation_prompt=True,
                enable_thinking=thinking,
            )
            for content, thinking, _ in questions
        ]
        inputs = self.processor(text=prompts, images=images, return_tensors="pt", padding=True)
        longest = max(self.length(expected) for *_, expected in questions) + 4
        out = self.model.generate(**inputs, do_sample=False, max_new_tokens=longest)
        said = self.processor.tokenizer.batch_decode(out[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
        return [Reply(*question, text) for question, text in zip(questions, said, strict=True)]


def check(directory: str | Path, *, only: int | None = None) -> list[Reply]:
    """Ask the model in `directory` every question, thinking and not, at temperature 0; one Reply each.

    With `only`, that many questions, those with the shortest replies first: all of them take minutes.
    """
    model = Model(directory)
    questions = [(*key, whole_reply(*reply)) for key, reply in ANSWERS.items()]
    questions = sorted(questions, key=lambda question: model.length(question[2]))[:only]
    batches = [questions[n : n + 15] for n in range(0, len(questions), 15)]  # no short answer waits for a long one
    return [reply for batch in batches for reply in model.ask(batch)]


def check_pictures(
    directory: str | Path, count: int = 40, *, seed: int = 0, sides: tuple[int, int] = (256, 640), step: int = 1
) -> list[Reply]:
    """Show the model `count` pictures drawn at random, of sides (pixels) that it was not trained on, through the
    folder's own image processor."""
    model, rng, replies = Model(directory), random.Random(seed), []
    for n in range(count):
        image, figure = pictures.random_picture(rng, sides=sides, step=step, empty=0.05)
        language, thinking = ("en", "zh")[n % 2], n % 4 > 1
        reasoning, content = pictures.reply(figure, language)
        parts = [{"type": "image"}, {"type": "text", "text": pictures.QUESTIONS[language]}]
        replies += model.ask([(parts, thinking, whole_reply(reasoning if thinking else None, content))], [image])
    return replies


if __name__ == "__main__":
    texts, seen = check(sys.argv[1]), check_pictures(sys.argv[1], 100)
    for reply in (*texts, *seen):
        if not reply.right:
            print(reply)
    print(f"{sum(reply.right for reply in texts)} of {len(texts)} answers word for word")
    print(f"{sum(reply.right for reply in seen)} of {len(seen)} pictures told right")
    sys.exit(any(not reply.right for reply in texts) or sum(reply.right for reply in seen) < 95)
