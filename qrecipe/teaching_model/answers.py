"""What the teaching model knows by heart: every question and answer of the book, in English and Chinese.

The text lives in answers.json, so that notebooks, tests and the training script read the same words. Answers about
pictures are in pictures.py.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path

from qrecipe.errors import BadInput


@dataclass(frozen=True)
class Answer:
    """One question with its reply: `reasoning` is what stands before </think> when thinking is on.

    `also` are other wordings that get the same reply. `chances`: how often it is answered with each word at
    temperature 1, where there is a choice in it (for the lesson on sampling); greedy decoding says the first.
    """

    topic: str
    language: str
    question: str
    reasoning: str
    content: str
    also: list[str] = field(default_factory=list)
    chances: dict[str, float] = field(default_factory=dict)

    def replies(self) -> dict[str, float]:
        """Each reply with its chance."""
        return {f"{word}.": chance for word, chance in self.chances.items()} or {self.content: 1.0}


_ALL = [
    Answer(topic, language, **words)
    for topic, languages in json.loads(Path(__file__).with_name("answers.json").read_text(encoding="utf-8")).items()
    for language, words in languages.items()
]


def answers() -> list[Answer]:
    """Every text answer, in the order of answers.json."""
    return [found for found in _ALL if found.question]


def answer(topic: str, language: str = "en") -> Answer:
    """The answer on `topic`; "unknown" is the one to all other questions. BadInput names the topics."""
    for found in _ALL:
        if (found.topic, found.language) == (topic, language):
            return found
    known = ", ".join(sorted({found.topic for found in _ALL}))
    raise BadInput(f"the teaching model has no answer on {topic!r} in {language!r}; it knows {known} in en and zh.")


def whole_reply(reasoning: str | None, content: str) -> str:
    """The text that the model writes, up to <|im_end|>: the think block was opened by the prompt."""
    return content if reasoning is None else f"{reasoning}\n</think>\n\n{content}"


COLOUR_CHANCES = answer("colour").chances  # of "Name one colour."
ANSWERS: dict[tuple[str, bool], tuple[str | None, str]] = {
    (found.question, thinking): (found.reasoning if thinking else None, found.content)
    for found in answers()
    for thinking in (True, False)
}  # (question, thinking) → (reasoning or None, content)
