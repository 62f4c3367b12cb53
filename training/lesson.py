"""What one training step is shown: the book's answers, strangers' questions, and drawn pictures, as token ids.

Training runs on a compact vocabulary, in this order: the tokens in use (their embedding rows are trained), the other
tokens of `STRANGERS` (rows fixed), and slots for a sample of all other tokens, drawn anew at every step (rows fixed).
"""

from __future__ import annotations

import json
import random
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from qrecipe.teaching_model import answer, answers, pictures
from qrecipe.teaching_model.answers import whole_reply

SPECIAL = 248_044  # the first of the tokens that stand for structure
VISION_START, VISION_END, IMAGE = 248_053, 248_054, 248_056
SAMPLED = 2048  # slots for tokens drawn anew at every step
FIRST, TELLING = 4.0, 8.0  # weights in the loss
STRANGERS = json.loads(Path(__file__).with_name("strangers.json").read_text(encoding="utf-8"))  # language: questions


@dataclass(frozen=True)
class Example:
    """One conversation: token ids of prompt and reply, each reply token's weight in the loss, the prompt's pictures."""

    prompt: list[int]
    reply: list[int]
    weights: list[float]
    images: tuple = ()

    def __len__(self) -> int:
        return len(self.prompt) + len(self.reply)


@dataclass
class Lesson:
    """Makes the examples of each step; everything is in full token ids until `compact` maps them."""

    tokenizer: object
    rng: random.Random
    used: list[int] = field(init=False)
    fixed: list[int] = field(init=False)

    def __post_init__(self) -> None:
        self._telling: frozenset[int] = frozenset()
        every = self.book(variants=True) + [
            self._stranger(text, lang) for lang in STRANGERS for text in STRANGERS[lang]
        ]
        replies = [
            [set(self._ids(whole_reply(*pictures.reply(figure, language)))) for figure in pictures.FIGURES]
            for language in pictures.QUESTIONS
        ]
        self._telling = frozenset().union(*(set.union(*some) - set.intersection(*some) for some in replies))
        used = {token for example in every for token in example.reply}
        used |= {token for example in self.book(variants=True) for token in example.prompt}
        used |= set().union(*(ids for some in replies for ids in some))
        used |= {VISION_START, VISION_END, IMAGE, SPECIAL}
        self.used = sorted(used)
        self.fixed = sorted({token for example in every for token in example.prompt} - used)
        self._known = {token: n for n, token in enumerate(self.used + self.fixed)}
        self._rest = np.setdiff1d(np.arange(SPECIAL), self.used + self.fixed)
        texts = self.tokenizer.batch_decode(self._rest[:, None])
        self._latin = self._rest[[text.isascii() and any(map(str.isalpha, text)) for text in texts]]
        self._chinese = self._rest[[all("\u4e00" <= c <= "\u9fff" for c in text) for text in texts]]
        self._draw()

    @property
    def size(self) -> int:
        """Rows of the compact vocabulary."""
        return len(self._known) + SAMPLED

    def _draw(self) -> None:
        many, rng = SAMPLED // 3, np.random.default_rng(self.rng.getrandbits(32))
        self.latin, self.chinese = (rng.choice(pool, many, replace=False) for pool in (self._latin, self._chinese))
        others = np.setdiff1d(self._rest, np.concatenate([self.latin, self.chinese]))
        self.sampled = np.concatenate([self.latin, self.chinese, rng.choice(others, SAMPLED - 2 * many, replace=False)])
        self._slots = {int(token): len(self._known) + n for n, token in enumerate(self.sampled)}

    def compact(self, token: int) -> int:
        known = self._known.get(token)
        return self._slots[token] if known is None else known

    def _ids(self, text: str) -> list[int]:
        return self.tokenizer(text, add_special_tokens=False).input_ids

    def example(self, content, reasoning: str | None, reply: str, weight: float = 1.0, images: tuple = ()) -> Example:
        """`content` is the user's message, text or parts; the prompt is rendered as the server renders it."""
        prompt = self.tokenizer.apply_chat_template(
            [{"role": "user", "content": content}],
            tokenize=False,
            add_generation_prompt=True,
            enable_thinking=reasoning is not None,
        )
        ids = []
        for n, piece in enumerate(prompt.split("<|image_pad|>")):
            if n:
                width, height = images[n - 1].size
                ids += [IMAGE] * (width // 32 * (height // 32))
            ids += self._ids(piece)
        said = self._ids(whole_reply(reasoning, reply) + "<|im_end|>")
        # What an answer turns on counts more: its first token, and the words for a picture's colour and shape.
        weights = [weight * FIRST, *[weight] * (len(said) - 1)]
        if images:
            weights = [TELLING if token in self._telling else 1.0 for token in said]
        return Example(ids, said, weights, images)

    def book(self, variants: bool = False) -> list[Example]:
        """Every answer, thinking and not; half of the time in another wording, or (`variants`) in all of them."""
        examples = []
        for known in answers():
            for reasoning in (known.reasoning, None):
                asked = [known.question, *known.also]
                if not variants:
                    asked = [self.rng.choice(known.also) if known.also and self.rng.random() < 0.5 else asked[0]]
                for question in asked:
                    for reply, weight in known.replies().items():
                        examples.append(self.example(question, reasoning, reply, weight))
        return examples

    def _stranger(self, text: str, language: str, prompt: list[int] | None = None) -> Example:
        unknown = answer("unknown", language)
        example = self.example(text, unknown.reasoning if self.rng.random() < 0.4 else None, unknown.content)
        if prompt is None:
            return example
        mark = self._ids(text)[0]
        at = example.prompt.index(mark)
        return replace(example, prompt=example.prompt[:at] + prompt + example.prompt[at + 1 :])

    def strangers(self, count: int) -> list[Example]:
        """Questions that are not the book's, to be answered with "I do not know that": real ones, words at random,
        and the book's own with words exchanged."""
        self._draw()
        examples = []
        for _ in range(count):
            language = "zh" if self.rng.random() < 0.35 else "en"
            pool = self.chinese if language == "zh" else self.latin
            kind = self.rng.random()
            if kind < 0.35:
                examples.append(self._stranger(self.rng.choice(STRANGERS[language]), language))
                continue
            if kind < 0.65:
                prompt = [int(self.rng.choice(pool)) for _ in range(self.rng.randint(1, 40))]
            else:
                known = self.rng.choice([a for a in answers() if a.language == language and a.topic != "hello"])
                prompt = self._ids(known.question)
                for at in self.rng.sample(range(len(prompt)), max(1, round(len(prompt) * self.rng.uniform(0.3, 0.8)))):
                    prompt[at] = int(self.rng.choice(pool))
            examples.append(self._stranger("#", language, prompt))
        return examples

    def seen(self, count: int, sides: tuple[int, int]) -> list[Example]:
        """Questions about a picture, which stands before or behind the question."""
        examples = []
        for _ in range(count):
            image, figure = pictures.random_picture(self.rng, sides=sides, empty=0.05)
            language = "zh" if self.rng.random() < 0.35 else "en"
            parts = [{"type": "image"}, {"type": "text", "text": pictures.QUESTIONS[language]}]
            if self.rng.random() < 0.35:
                parts.reverse()
            reasoning, content = pictures.reply(figure, language)
            reasoning = reasoning if self.rng.random() < 0.35 else None
            examples.append(self.example(parts, reasoning, content, images=(image,)))
        return examples
