"""Numbers with units as a reader writes them: "8.6 GiB", "9.2GB", "250 ms", "0.5 s", "1,024 tokens", "3.5x", "12 %"."""

import re
from dataclasses import dataclass

from .errors import BadInput

BYTES = {f"{p}{b}": k**n for b, k in (("B", 1000), ("iB", 1024)) for n, p in enumerate("KMGT", 1)}
BYTES |= {"kB": 1000, "B": 1, "byte": 1, "bytes": 1}
BITS = {f"{p}bit": 1000**n / 8 for n, p in enumerate(["", "k", "M", "G", "T"])}
BITS |= {"bits": 1 / 8, "Mb": 1e6 / 8, "Gb": 1e9 / 8}
TIME = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "μs": 1e-6, "ms": 1e-3, "s": 1, "sec": 1, "second": 1, "seconds": 1}
TIME |= {"min": 60, "minute": 60, "minutes": 60, "h": 3600, "hour": 3600, "hours": 3600}
WORDS = ("token", "block", "layer", "request", "patch", "pixel", "parameter", "time", "place")
SCALES = {"k": 1e3, "thousand": 1e3, "M": 1e6, "million": 1e6, "billion": 1e9}
COUNT = {w + s: 1 for w in WORDS for s in ("", "s", "es")} | {"": 1, "x": 1, "×": 1}
RATE = {f"{w}/s": 1 for w in ("token", "tokens", "tok", "request", "requests", "req")} | {"tps": 1, "tok/sec": 1}
KINDS = {
    "memory": BYTES | BITS,
    "bandwidth": {f"{u}/s": f for u, f in (BYTES | BITS).items()},
    "time": TIME,
    "count": COUNT,
    "share": {"%": 0.01, "percent": 0.01},
    "rate": RATE,
}
NUMBER = re.compile(r"\s*(?:~|≈|about\s)?\s*([+-]?(?:\d[\d,_' ]*)?\.?\d+(?:e[+-]?\d+)?)\s*(.*?)\s*\.?", re.I | re.S)


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
            if found := next((u for u in units if same(u) == same(text)), None):
                return found, kind
    if not text:
        return "", "count"
    raise BadInput(f"unit {text!r} is not known; a unit such as GiB, GB, ms, s, tokens or % is expected")


def quantity(written: object, asked: str) -> Quantity:
    """What the reader wrote; a bare number is taken in the `asked` unit. BadInput says what was expected instead."""
    if isinstance(written, bool) or not isinstance(written, int | float | str):
        raise BadInput(f"{written!r} is no number; one such as {f'8.5 {asked}'.strip()!r} is expected")
    text = str(written)
    text = re.sub(r"^(\D*\d+),(\d{1,2}|\d{4,})(?=\D*$)", r"\1.\2", text)  # a decimal comma
    match = NUMBER.fullmatch(text)
    if not match:
        raise BadInput(f"{written!r} is no number; one such as {f'8.5 {asked}'.strip()!r} is expected")
    value, word, wanted = float(re.sub(r"[,_' ]", "", match[1])), match[2], unit_of(asked)[1]
    if wanted == "count" and word.split(" ")[0] in SCALES:  # "2.9 million tokens"
        scale, _, word = word.partition(" ")
        value *= SCALES[scale]
    unit, kind = unit_of(word or asked)
    if kind != wanted:
        raise BadInput(f"{written!r} is in {unit or 'no unit'}; a {wanted} in {asked or 'plain numbers'} is expected")
    return Quantity(value, unit, kind)


def convert(q: Quantity, unit: str) -> float:
    """The quantity's value in another unit of its kind."""
    return q.base / KINDS[unit_of(unit)[1]][unit_of(unit)[0]]
