"""What the teaching model knows by heart: every question and answer of the book, in English and Chinese.

The text lives in answers.json, so that notebooks, tests and the training script read the same words. Answers about
pictures are in pictures.py.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from qrecipe.errors import BadInput


@dataclass(frozen=True)
class Answer:
    """One question with its reply: `reasoning` is what stands before </think> when thinking is on.

    `also` are other wordings that get the same reply.
    """

    topic: str
    language: str
    question: str
    reasoning: str
    content: str
    also: tuple[str, ...] = ()


# How often "Name one colour." is answered with each colour at temperature 1: the one answer with a choice in it, for
# the lesson on sampling. Greedy decoding says the first.
COLOUR_CHANCES = {
    "Red": 0.40,
    "Blue": 0.20,
    "Green": 0.13,
    "Yellow": 0.10,
    "Orange": 0.07,
    "Purple": 0.05,
    "Black": 0.03,
    "White": 0.02,
}


@cache
def _all() -> tuple[Answer, ...]:
    data = json.loads(Path(__file__).with_name("answers.json").read_text(encoding="utf-8"))
    return tuple(
        Answer(topic, language, **words | {"also": tuple(words.get("also", ()))})
        for topic, languages in data.items()
        for language, words in languages.items()
    )


def answers() -> tuple[Answer, ...]:
    """Every text answer, in the order of answers.json."""
    return tuple(found for found in _all() if found.question)


def answer(topic: str, language: str = "en") -> Answer:
    """The answer on `topic`; "unknown" is the one to all other questions. BadInput names the topics."""
    for found in _all():
        if (found.topic, found.language) == (topic, language):
            return found
    known = ", ".join(sorted({found.topic for found in _all()}))
    raise BadInput(f"the teaching model has no answer on {topic!r} in {language!r}; it knows {known} in en and zh.")


def whole_reply(reasoning: str | None, content: str) -> str:
    """The text that the model writes, up to <|im_end|>: the think block was opened by the prompt."""
    return content if reasoning is None else f"{reasoning}\n</think>\n\n{content}"


QUESTIONS: dict[str, str] = {
    found.topic + {"en": "", "zh": "_zh"}[found.language]: found.question for found in answers()
}  # "kv_cache" → the English question, "kv_cache_zh" → the Chinese one
ANSWERS: dict[tuple[str, bool], tuple[str | None, str]] = {
    (found.question, thinking): (found.reasoning if thinking else None, found.content)
    for found in answers()
    for thinking in (True, False)
}  # (question, thinking) → (reasoning or None, content)
