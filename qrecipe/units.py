"""Numbers with units as a reader writes them: "8.6 GiB", "9.2GB", "250 ms", "0.5 s", "1,024 tokens", "3.5x", "12 %"."""

import json
import re
from dataclasses import dataclass
from math import inf
from pathlib import Path

from .errors import BadInput

KINDS = json.loads((Path(__file__).parent / "data" / "units.json").read_text(encoding="utf-8"))  # kind: unit: its size
del KINDS["about"]
SCALES = {"k": 1e3, "thousand": 1e3, "M": 1e6, "million": 1e6, "billion": 1e9}
NUMBER = re.compile(r"\s*(?:~|≈|about\s)?\s*([+-]?(?:\d[\d,_' ]*)?\.?\d+(?:e[+-]?\d+)?)\s*(.*?)[\s.!]*", re.I | re.S)


@dataclass(frozen=True)
class Quantity:
    """A value in the unit that was written; `kind` is one of KINDS, `base` the value in bytes, seconds, 1."""

    value: float
    unit: str
    kind: str

    @property
    def base(self) -> float:
        """The value in the kind's own unit: bytes, bytes/s, seconds or 1."""
        return self.value * KINDS[self.kind][self.unit]

    def __str__(self) -> str:
        return f"{self.value:,.12g} {self.unit}".rstrip()


def unit_of(text: str) -> tuple[str, str]:
    """(unit, kind) as the table has it; capitals count only where they tell two units apart (Gb, GB). BadInput if unknown."""
    for same in (str, str.lower):
        for kind, units in KINDS.items():
            for unit in units:
                if same(unit) == same(text):
                    return unit, kind
    raise BadInput(f"unit {text!r} is not known; a unit such as GiB, GB, ms, s, tokens or % is expected")


def quantity(written: object, asked: str) -> Quantity:
    """What the reader wrote; a bare number is taken in the `asked` unit. BadInput says what was expected instead."""
    text = str(written) if type(written) in (int, float, str) else ""
    text = re.sub(r"^(\D*\d+),(\d{1,2}|\d{4,})(?=\D*$)", r"\1.\2", text)  # a decimal comma
    match = NUMBER.fullmatch(text)
    value = float(re.sub(r"[,_' ]", "", match[1])) if match else inf
    if value in (inf, -inf) or match[2].startswith(":"):  # a time of day is no number either
        raise BadInput(f"{written!r} is no number; one such as {f'0.25 {asked}'.strip()!r} is expected")
    word, wanted = match[2], unit_of(asked)[1]
    if re.search(r"[*/+^-]\s*\(?\d", word):
        raise BadInput(
            f"{written!r} is a calculation; its result is expected (Python works it out where no quotes are)"
        )
    word = re.split(r"\s(?:of|for|each|at|in)\b", word)[0]
    if wanted == "count" and word.split(" ")[0] in SCALES:  # "2.9 million tokens"
        scale, _, word = word.partition(" ")
        value *= SCALES[scale]
    unit, kind = unit_of(word or asked)
    things = {re.sub("(?<=ch)es$|s$", "", one) for one in (unit, asked)} - {"", "x", "×", "time"}
    if kind != wanted or kind == "count" and len(things) > 1:  # tokens are no requests
        raise BadInput(f"{written!r} is in {unit or 'no unit'}; a {wanted} in {asked or 'plain numbers'} is expected")
    return Quantity(value, unit, kind)


def convert(q: Quantity, unit: str) -> float:
    """The quantity's value in another unit of its kind."""
    return q.base / KINDS[unit_of(unit)[1]][unit_of(unit)[0]]
