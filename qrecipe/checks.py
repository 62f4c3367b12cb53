"""Values from outside, checked or refused by name; NaN, infinity, booleans and text are no numbers."""

import re
from contextlib import suppress
from typing import Any

from qrecipe.errors import BadInput

UNITS = {"k": 10**3, "m": 10**6, "g": 10**9, "K": 2**10, "M": 2**20, "G": 2**30, "": 1}  # as vllm serve reads them
CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")  # what a log, a model or a name could steer a terminal with


def whole_number(text: str) -> int:
    """A whole number as `vllm serve` takes it: 32768, 32k (32,000), 32K (32,768), 25.6k. ValueError for anything else."""
    found = re.fullmatch(r"(-?\d{1,15}(?:\.\d{1,6})?)([kKmMgG]?)", text)
    value = float(found[1]) * UNITS[found[2]] if found else 0.5
    if value != int(value) or (found and "." in found[1] and found[2] not in ("k", "m", "g")):
        raise ValueError
    return int(value)


def check_number(value: Any, name: str, low: float, high: float, kind: type = int, hint: str = "") -> Any:
    """`value` as an int or a float from `low` to `high`; BadInput says what was found and what is expected."""
    good = isinstance(value, (int, float)) and not isinstance(value, bool) and low <= value <= high  # NaN fails here
    if not good or (kind is int and value != int(value)):
        expected = f"a {'whole number' if kind is int else 'number'} from {low} to {high}"
        with suppress(ValueError, TypeError):  # 32K is for the command line, which reads it; a notebook's is a number
            hint += f" (without quotes and letters: {whole_number(value)})"
        raise BadInput(f"{name} is {value!r}; {expected}{hint} is expected")
    return kind(value)


def version_tuple(version: str) -> tuple[int, int]:
    """(major, minor) of a vLLM version; a development build (0.0.x, dev) counts as 0.27. BadInput for anything else."""
    found = re.match(r"v?(\d{1,4})\.(\d{1,4})\b", version)
    if not found and "dev" not in version:
        raise BadInput(f"vllm_version is {version!r}; a version such as 0.27.0 is expected")
    return (int(found[1]), int(found[2])) if found and found[0].strip("v") != "0.0" else (0, 27)
