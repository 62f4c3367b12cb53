"""Exercises that check an answer: `check("1.1", answer, ...)` in a notebook cell; what is asked stands above that cell.

data/exercises.toml holds the rest, so that no cell gives its solution away. Three kinds:
number  a quantity in any unit: right within `tolerance` of `right` (a law, or what the reader measured), or where it is
        `right` rounded to two digits or more, or down to a `whole` number. A wrong one is told by how much, and which of
        `mistakes` (value, what it says) it looks like; a mistake within the tolerance cannot be told from `right`
choose  a letter; each wrong one has its reason
change  a dict or a text that `effect` (a function of the notebook) puts to work; `fails` (condition, what it says) looks
        at what came of it. What is not as `expects` (condition, what is expected), or is refused, costs no try
`recorded` holds what the notebook passes, where that is the same for every reader; `key` is for the teacher, where it is not.
The TOML's expressions and texts ({...} as in an f-string) see the keyword arguments of `check`, `right` and `answer`.
After the second wrong try comes a hint, after the third the worked solution. Nothing typed passes quietly.
"""

import functools
import json
import math
import re
import tomllib
from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib.resources import files
from itertools import groupby
from pathlib import Path
from typing import Any

from . import chapter as running
from .errors import BadInput, RecipeError
from .paths import read_record, runs_dir, writable, write_whole
from .show_table import Table, escape
from .units import Quantity, convert, quantity, unit_of

LOOK = {"right": ("✓", "#009E73"), "wrong": ("✗", "#D55E00"), "open": ("○", "#8a877c")}
TRIES = 3  # the wrong try after which the solution is shown
SLIPS = {  # kind of unit -> (factor of the slip, what it says); for every number of that kind
    "memory": [(8.0, "Eight times: that counts bits; a byte has 8 bits."), (1 / 8, "An eighth: bits were taken for bytes; a byte has 8 bits.")],
    "time": [(1000.0, "A thousand times: ms and s are mixed up."), (1e-3, "A thousandth: ms and s are mixed up.")],
    "count": [(1e-3, "A thousandth: if the dot stands for thousands, write 1,234 or 1234.")],
    "share": [(100.0, "A hundred times: share and percent are mixed up."), (0.01, "That is the share; in percent it is 100 times that.")],
}  # fmt: skip
for n, p in enumerate("KMG", 1):  # a unit of 2¹⁰ and its twin of 10³; asked is what the reader wrote
    twins = f"{p}B (10{'³⁶⁹'[n - 1]} bytes)", f"{p}iB (2{'¹²³'[n - 1]}⁰ bytes)"
    SLIPS[f"{p}iB"] = [(1.024**n, "That is the number in {}; in {} it is smaller.".format(*twins))]
    SLIPS[f"{p}B"] = [(1 / 1.024**n, "That is the number in {1}; in {0} it is larger.".format(*twins))]
    for other, step in [("KMG"[n - 2 : n - 1], 1), ("KMG"[n : n + 1], -1)]:  # the unit below, the one above
        for unit, factor in [(f"{other}iB", 1024.0**step), (f"{other}B", 1.024**n * 1000.0**step)]:
            SLIPS[f"{p}iB"] += [(factor, f"That is the number in {unit}, read here as {p}iB.")] if other else []
COMMA = "A comma before three digits stands for thousands; a decimal comma is better written as a dot."


@dataclass(frozen=True)
class Told:
    """What the reader is told: `state` is right, wrong or open; `lines` are paragraphs."""

    state: str
    lines: tuple[str, ...]

    def __repr__(self) -> str:
        return "\n".join((f"{LOOK[self.state][0]} {self.lines[0]}", *self.lines[1:]))

    def _repr_html_(self) -> str:
        sign, color = LOOK[self.state]
        first, *more = map(escape, self.lines)
        rest = "".join(f"<p style='margin:.3em 0 0'>{line}</p>" for line in more)
        style = f"border-left:5px solid {color};padding:.25em .8em;max-width:60em"
        return f"<div role='status' style='{style}'><b>{sign} {first}</b>{rest}</div>"


@functools.cache
def book() -> dict[str, dict]:
    """All exercises by number ("1.1" is the first of chapter 1), in the book's order."""
    return tomllib.loads((files("qrecipe") / "data/exercises.toml").read_text())


def check_answers(answers: Any) -> None:
    """Refuse a parameter `answers` that is no mapping from exercises to answers."""
    if not isinstance(answers, dict):
        raise BadInput(f"answers {answers!r}: a mapping such as {{'1.1': '8.4 GiB'}} is expected")
    if unknown := sorted(set(map(str, answers)) - set(book())):
        raise BadInput(f"answers name {', '.join(unknown)}: the exercises are {', '.join(book())}")


def check(name: str, answer: Any = None, effect: Callable | None = None, **values: Any) -> Told:
    """Judge an answer and tell; where the cell has none, the one that the parameter `answers` gives (a list: several tries)."""
    chapter, nothing = running.current("check"), (None, "", {})
    tried = chapter.exercises.setdefault(name, {"state": "open", "tries": []})
    answers = [answer]
    if answer in nothing:
        given = chapter.parameters.get("answers", {}).get(name)
        answers = given if isinstance(given, list) else [given]
    told = Told("open", (f"Exercise {name}: not answered yet.",))
    for one in answers:
        if one not in nothing:
            told = _try(name, tried, one, effect, {"ceil": math.ceil, "fullmatch": re.fullmatch} | values)
    if done := {n: e for n, e in chapter.exercises.items() if e["tries"]}:
        file = _folder() / f"{chapter.name}.json"
        write_whole(file, json.dumps(read_record(file) | done, indent=1, ensure_ascii=False) + "\n")
    return told


def _try(name: str, tried: dict, answer: Any, effect: Callable | None, env: dict) -> Told:
    """One answer judged and remembered; the same one again is no new try, nor is any after the right one."""
    spec = book()[name]
    if "right" in spec and (right := evaluate(spec["right"], env)) is None:
        missing = spec.get("missing", "it was not measured.")
        return Told("open", (f"Exercise {name}: this cannot be checked on this device: {missing}",))
    env |= {"right": right} if "right" in spec else {}
    try:
        good, says = {"number": _number, "choose": _choose, "change": _change}[spec["kind"]](spec, answer, effect, env)
    except BadInput as why:  # not readable, not judged
        return Told("open", (f"Exercise {name}: {why}",))
    done = tried["state"] == "right"
    if not done and str(answer) not in tried["tries"]:
        tried["tries"].append(str(answer))
    if good:
        tried["state"] = "right"
        more = [say(spec["why"], env)] if "why" in spec else []
        return Told("right", (f"Exercise {name}: right.", says, *more))
    if done:
        return Told("wrong", (f"Exercise {name}: not this; an answer before was right.", says))
    tried["state"] = "wrong"
    wrong = len(tried["tries"])
    helps = ("hint", "solution")[: max(0, wrong - TRIES + 2)]
    more = [f"{key.capitalize()}: {say(spec[key], env)}" for key in helps]
    return Told("wrong", (f"Exercise {name}, try {wrong}: not yet.", says, *more))


def say(text: str, env: dict) -> str:
    return " ".join(evaluate(f'f"""{text}"""', env).split())


def evaluate(expression: str, env: dict) -> Any:
    """An expression of the book's own TOML file."""
    return eval(expression, dict(env))


def _number(spec: dict, answer: Any, effect: None, env: dict) -> tuple[bool, str]:
    asked, right = spec["unit"], env["right"]
    yours = quantity(answer, asked)
    env["answer"] = value = convert(yours, asked)
    short = right if isinstance(right, int) else float(f"{right:.4g}") if abs(right) < 1e4 else round(right)
    exact = Quantity(short, *unit_of(asked))
    slips = _slips(spec, (exact.kind, yours.unit), env)
    if re.search(r"\d,\d{3}(?!\d)", str(answer)):
        slips = [(1000 * right, COMMA), *slips]
    twin = yours.unit.replace("i", "") == exact.unit.replace("i", "")  # a number for GiB may have been written with GB
    near = [
        (min(abs(one / (kept or slip) - 1) for one in {value, yours.value if twin else value}), slip, says)
        for slip, says in slips
        for kept in {slip, math.floor(slip) if "whole" in spec else slip}
    ]
    distance, slip, says = min(near, key=lambda one: one[0], default=(1, math.inf, ""))
    if _holds(spec, right, yours, slip, [one for one, _ in slips]):
        same = (
            ""
            if yours.unit in (exact.unit, "") or value == yours.value
            else f" are {Quantity(float(f'{value:.4g}'), *unit_of(asked))}"
        )
        return True, f"{yours}{same}" + (f"; exactly {exact}." if abs(value - short) > abs(right) / 2000 else ".")
    likely = ""
    far = not 0.5 < value / right < 2  # then a slip is none of its neighbours, however roughly it was rounded
    if distance <= (0.05 if far else max(0.01, min(spec["tolerance"], 0.05))):
        likely = " " + say(says, env)
    elif "whole" in spec and yours.value == math.ceil(right):
        likely = " The last of them does not fit whole: round down."
    elif _rounded(right, 1, yours, asked) and abs(value / right - 1) < 0.15:
        likely = " That is rounded to one digit: give two or more."
    return False, f"{yours} is {_by_how_much(value, right)}.{likely}"


def _slips(spec: dict, kinds: tuple[str, str], env: dict) -> list[tuple[float, str]]:
    """(value, what it says) of the mistakes of this exercise and of every number of these kinds, where they can be told from `right`."""
    right = env["right"]
    slips = [(evaluate(expression, env), says) for expression, says in spec.get("mistakes", [])]
    slips += [(right * factor, says) for kind in kinds for factor, says in SLIPS.get(kind, [])]
    return [one for one in slips if one[0] and abs(one[0] / right - 1) > spec["tolerance"]]


def _holds(spec: dict, right: float, yours: Quantity, slip: float, slips: list[float]) -> bool:
    """Right within the tolerance and not nearer to the slip, or `right` rounded to what was written, unless a slip is as well."""
    asked, value = spec["unit"], convert(yours, spec["unit"])
    off, last = abs(value - right), convert(replace(yours, value=_last_digit(yours.value)), asked)
    if "whole" in spec and yours.value == math.floor(right):
        return True
    if off <= (spec["tolerance"] + 1e-9) * (abs(right) or 1) and (off <= last / 2 or off <= abs(value - slip)):
        return True
    others = [one for one in slips if abs(one / right - 1) > 0.01]
    fits = [n for n in range(2, 7) if _rounded(right, n, yours, asked)]
    return not isinstance(right, int) and any(not any(_rounded(o, n, yours, asked) for o in others) for n in fits)


def _rounded(exact: float, digits: int, yours: Quantity, asked: str) -> bool:
    """Whether `exact`, in the unit that is asked, makes what was written when rounded in the unit of that."""
    return math.isclose(float(f"{exact / convert(replace(yours, value=1.0), asked):.{digits}g}"), yours.value)


def _last_digit(value: float) -> float:
    """The place of the last decimal that was written: 0.01 for 3.63, 1 for a whole number."""
    return 10.0 ** -len(f"{value:.12f}".rstrip("0").partition(".")[2])


def _by_how_much(value: float, right: float) -> str:
    if value <= 0 < right:
        return "not above zero"
    ratio = value / right
    if 0.5 <= ratio <= 2:
        return f"{round(100 * abs(ratio - 1), 1):g} % too {'large' if ratio > 1 else 'small'}"
    return f"{float(f'{max(ratio, 1 / ratio):.3g}'):,g} times " + (
        "as large as it should be" if ratio > 1 else "too small"
    )


def _choose(spec: dict, answer: Any, effect: None, env: dict) -> tuple[bool, str]:
    letters, found = spec["options"], re.fullmatch(r"\W*([a-z])(\W*|[).:].*)", str(answer).lower(), re.S)
    if not found or (said := found[1]) not in letters:
        raise BadInput(f"{answer!r} is none of the letters {', '.join(letters)}; one of them is expected")
    return said == env["right"], f"{said}: {say(letters[said], env | {'answer': said})}"


def _change(spec: dict, answer: Any, effect: Callable, env: dict) -> tuple[bool, str]:
    kind = {"dict": dict, "text": str}[spec["answer"]]
    if not isinstance(answer, kind):
        raise BadInput(f"{answer!r}: {'a dict' if kind is dict else 'a text'} such as {spec['example']} is expected")
    if kind is dict:  # flags as they are typed in a terminal
        answer = {str(name).lstrip("-").replace("-", "_"): value for name, value in answer.items()}
    env["answer"] = answer
    holds, expected = spec["expects"]
    unlike = BadInput(f"{answer!r} cannot be used here; {expected} expected")
    try:
        if not evaluate(holds, env):
            raise unlike
        if slip := _first(spec.get("slips", []), env):  # to be seen in the answer alone
            return False, slip
        env["effect"] = effect(answer)
        failed = _first(spec["fails"], env)
        return not failed, failed or say(spec["proof"], env)
    except RecipeError as why:
        raise (why if why is unlike else BadInput(f"{answer!r}: {why}")) from None
    except Exception:  # what a library says of it is no sentence for a reader
        raise (BadInput(spec["refused"]) if "refused" in spec else unlike) from None


def _first(told: list, env: dict) -> str:
    """What the first condition that holds says."""
    return next((say(says, env) for condition, says in told if evaluate(condition, env)), "")


def _folder() -> Path:
    """Where the answers of this run are kept: beside the executed copies, else in the folder of all runs."""
    return writable((running.told_folder() or runs_dir()) / "exercises")


def card() -> Any:
    """The progress card: the open chapter exercise by exercise, the other chapters in one line each; one line if all is open."""
    mine = running.current("card").exercises
    kept: dict[str, dict] = {}
    for file in sorted(_folder().glob("*.json")):
        kept |= read_record(file)
    kept |= {n: e for n, e in mine.items() if e["tries"] or n not in kept}
    if not any(kept[n]["tries"] for n in mine):
        return Told("open", (f"Exercises: none of {len(mine)} answered; run this cell again after you have.",))
    rows = []
    for n in mine:
        state, tries = kept[n]["state"], len(kept[n]["tries"])
        word = f"{LOOK[state][0]} {'not yet' if state == 'wrong' else state}"
        rows.append(
            (f"{n} {book()[n]['title']}", word + (f", {tries} {'try' if tries == 1 else 'tries'}" if tries else ""))
        )
    for number, ones in groupby(book(), key=lambda n: n.split(".")[0]):
        marks = ["■" if kept.get(n, {}).get("state") == "right" else "□" for n in ones]
        told = f"{''.join(sorted(marks))} {marks.count('■')} of {len(marks)}"
        rows.append((f"chapter {int(number):02}", told))
    total = sum(e["state"] == "right" for e in kept.values())
    return Table(rows, ["exercise", "so far"], f"Your card: {total} of {len(book())} exercises of the book are right")


def summary() -> dict[str, Any]:
    """For the chapter's JSON: how many exercises it has, and those that were answered (open: not in a way that can be judged)."""
    chapter = running.current("summary")
    done, given = chapter.exercises, chapter.parameters.get("answers", {})
    right = sum(e["state"] == "right" for e in done.values())
    return {"of": len(done), "right": right, "answered": {n: e for n, e in done.items() if e["tries"] or n in given}}
