"""What the teaching model knows by heart: every question and answer of the book, in English and Chinese.

The text lives in answers.json, so that notebooks, tests and the training script read the same words.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from qrecipe.errors import BadInput


@dataclass(frozen=True)
class Answer:
    """One question with its reply: `reasoning` is what stands before </think> when thinking is on."""

    topic: str
    language: str
    question: str
    reasoning: str
    content: str


@cache
def answers() -> tuple[Answer, ...]:
    """Every text answer, in the order of answers.json."""
    data = json.loads(Path(__file__).with_name("answers.json").read_text(encoding="utf-8"))
    return tuple(
        Answer(topic, language, **words) for topic, languages in data.items() for language, words in languages.items()
    )


def answer(topic: str, language: str = "en") -> Answer:
    """The answer on `topic`; BadInput names the topics when there is none."""
    for found in answers():
        if (found.topic, found.language) == (topic, language):
            return found
    known = ", ".join(sorted({found.topic for found in answers()}))
    raise BadInput(f"the teaching model has no answer on {topic!r} in {language!r}; it knows {known} in en and zh.")


def _questions() -> dict[str, str]:
    names = {"en": "", "zh": "_zh"}
    return {found.topic + names[found.language]: found.question for found in answers()}


QUESTIONS: dict[str, str] = _questions()  # "kv_cache" → the English question, "kv_cache_zh" → the Chinese one
ANSWERS: dict[tuple[str, bool], tuple[str | None, str]] = {
    (found.question, thinking): (found.reasoning if thinking else None, found.content)
    for found in answers()
    for thinking in (True, False)
}  # (question, thinking) → (reasoning or None, content)
