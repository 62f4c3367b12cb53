"""Exercises that check an answer: `check("1.1", answer, ...)` in a notebook cell; what is asked stands above that cell.

data/exercises.toml holds the rest, so that no cell gives its solution away. Three kinds:
number  a quantity in any unit, held against `right` (a law, or what the reader measured) within `tolerance`; a wrong one
        is told by how much, and which of `mistakes` (value, what it says) it looks like
choose  a letter; each wrong one has its reason
change  a dict or a text that `effect` (a function of the notebook) puts to work; `fails` (condition, what it says) looks
        at what came of it
The TOML's expressions and texts ({...} as in an f-string) see the keyword arguments of `check`, `right` and `answer`.
After the second wrong try comes a hint, after the third the worked solution. Nothing typed passes quietly.
"""

import functools
import html
import json
import math
import tomllib
from collections.abc import Callable
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

from . import chapter as running
from .errors import BadInput
from .paths import runs_dir, writable, write_whole
from .units import Quantity, convert, quantity, unit_of

LOOK = {"right": ("✓", "#009E73"), "wrong": ("✗", "#D55E00"), "open": ("○", "#8a877c")}
TRIES = 3  # the wrong try after which the solution is shown
SLIPS = {  # kind of unit -> (factor of the slip, what it says); for every number of that kind
    "memory": [(8.0, "Eight times: that counts bits; a byte has 8 bits."), (1 / 8, "An eighth: bits were taken for bytes; a byte has 8 bits.")],
    "time": [(1000.0, "A thousand times: ms and s are mixed up."), (1e-3, "A thousandth: ms and s are mixed up.")],
    "share": [(100.0, "A hundred times: share and percent are mixed up."), (0.01, "That is the share; in percent it is 100 times that.")],
}  # fmt: skip
for n, p in enumerate("KMG", 1):  # a unit of 2¹⁰ and its twin of 10³
    twins = f"{p}B (10{'³⁶⁹'[n - 1]} bytes)", f"{p}iB (2{'¹²³'[n - 1]}⁰ bytes)"
    SLIPS[f"{p}iB"] = [
        (1.024**n, "That is the number in {}; in {} it is smaller.".format(*twins)),
        (1 / 1.024**n, "That is the number in {1}; in {0} it is larger.".format(*twins)),
    ]


@dataclass(frozen=True)
class Told:
    """What the reader is told: `state` is right, wrong or open; `lines` are paragraphs."""

    state: str
    lines: tuple[str, ...]

    def __repr__(self) -> str:
        return "\n".join((f"{LOOK[self.state][0]} {self.lines[0]}", *self.lines[1:]))

    def _repr_html_(self) -> str:
        sign, color = LOOK[self.state]
        first, *more = (html.escape(line).replace("$", "<span>$</span>") for line in self.lines)
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
    if running._current is None:
        raise BadInput("check() without begin(): run the chapter from its first cell")
    spec, tried = book()[name], running._current.exercises.setdefault(name, {"state": "open", "tries": []})
    if answer in (None, "", {}):
        given = running._current.parameters.get("answers", {}).get(name)
        answers = [] if given in (None, "", {}) else given if isinstance(given, list) else [given]
    else:
        answers = [answer]
    told = Told("open", (f"Exercise {name}: not answered yet.",))
    for one in answers:
        told = _try(name, spec, tried, one, effect, values)
    _save()
    return told


def _try(name: str, spec: dict, tried: dict, answer: Any, effect: Callable | None, values: dict) -> Told:
    """One answer judged and remembered; the same one again is no new try."""
    env = {"ceil": math.ceil} | values
    try:
        state, says = {"number": _number, "choose": _choose, "change": _change}[spec["kind"]](spec, answer, effect, env)
    except BadInput as why:  # not readable, not judged
        return Told("open", (f"Exercise {name}: {why}",))
    if state == "open":
        return Told("open", (f"Exercise {name}: {says}",))
    if str(answer) not in tried["tries"]:
        tried["tries"].append(str(answer))
    wrong = len(tried["tries"])
    if state == "right":
        tried["state"] = "right"
        return Told("right", (f"Exercise {name}: right.", says, *_texts(spec, ["why"], env)))
    tried["state"] = "right" if tried["state"] == "right" else "wrong"
    more = _texts(spec, ["hint"] * (wrong >= TRIES - 1) + ["solution"] * (wrong >= TRIES), env)
    return Told("wrong", (f"Exercise {name}, try {wrong}: not yet.", says, *more))


def _texts(spec: dict, keys: list[str], env: dict) -> list[str]:
    head = {"hint": "Hint: ", "solution": "Solution: ", "why": ""}
    return [head[k] + say(spec[k], env) for k in keys if k in spec]


def say(text: str, env: dict) -> str:
    return " ".join(evaluate(f'f"""{text}"""', env).split())


def evaluate(expression: str, env: dict) -> Any:
    """An expression of the book's own TOML file."""
    return eval(expression, dict(env))


def _number(spec: dict, answer: Any, effect: None, env: dict) -> tuple[str, str]:
    asked = spec["unit"]
    right = evaluate(spec["right"], env)
    if right is None:
        return "open", "this cannot be checked on this device: " + spec.get("missing", "it was not measured.")
    yours = quantity(answer, asked)
    value = convert(yours, asked)
    env |= {"right": right, "answer": value}
    off = abs(value / right - 1) if right else abs(value)
    exact = Quantity(_short(right), unit_of(asked)[0], unit_of(asked)[1])
    if off <= spec["tolerance"] + 1e-9:
        return "right", f"{yours}" + (f"; exactly {exact}." if str(exact) != str(yours) else ".")
    slips = [(evaluate(expression, env), says) for expression, says in spec.get("mistakes", [])]
    slips += [(right * factor, says) for key in (exact.kind, asked) for factor, says in SLIPS.get(key, [])]
    near = [(abs(value / slip - 1), says) for slip, says in slips if slip]
    distance, says = min(near, key=lambda pair: pair[0], default=(1, ""))
    likely = " " + say(says, env) if distance <= max(0.01, min(spec["tolerance"], 0.05)) else ""
    return "wrong", f"{yours} is {_by_how_much(value, right)}.{likely}"


def _short(value: float) -> float:
    return value if isinstance(value, int) else float(f"{value:.4g}") if abs(value) < 1e4 else round(value)


def _by_how_much(value: float, right: float) -> str:
    if value <= 0 < right:
        return "not above zero"
    ratio = value / right
    if 0.5 <= ratio <= 2:
        off = abs(ratio - 1)
        return f"{off:.1%}".replace(".0%", "%").replace("%", " %") + (" too large" if ratio > 1 else " too small")
    return f"{ratio:,.3g} times as large as it should be" if ratio > 1 else f"{1 / ratio:,.3g} times too small"


def _choose(spec: dict, answer: Any, effect: None, env: dict) -> tuple[str, str]:
    letters, said = spec["options"], str(answer).strip(" ().").lower()
    if said not in letters:
        raise BadInput(f"{answer!r} is none of {', '.join(letters)}")
    right = evaluate(spec["right"], env)
    if right is None:
        return "open", "this cannot be checked on this device: " + spec.get("missing", "it was not measured.")
    env |= {"right": right, "answer": said}
    return ("right" if said == right else "wrong"), f"{said}: {say(letters[said], env)}"


def _change(spec: dict, answer: Any, effect: Callable, env: dict) -> tuple[str, str]:
    kind = {"dict": dict, "text": str}[spec["answer"]]
    if not isinstance(answer, kind):
        raise BadInput(f"{answer!r}: {'a dict' if kind is dict else 'a text'} such as {spec['example']} is expected")
    env["answer"] = answer
    try:
        for condition, says in spec.get("slips", []):  # to be seen in the answer alone
            if evaluate(condition, env):
                return "wrong", say(says, env)
        env["effect"] = effect(answer)
    except Exception as why:  # whatever the reader's change does to a server or a library is told to him
        return "wrong", f"It was refused: {' '.join(str(why).split())[:300] or type(why).__name__}"
    for condition, says in spec["fails"]:
        if evaluate(condition, env):
            return "wrong", say(says, env)
    return "right", say(spec["proof"], env)


def _folder():
    """Where the answers of this run are kept: beside the executed copies, else in the folder of all runs."""
    told = running.told_folder()
    return writable((told or runs_dir()) / "exercises")


def _save() -> None:
    chapter = running._current
    done = {n: e for n, e in chapter.exercises.items() if e["tries"]}
    if done:
        file = _folder() / f"{chapter.name}.json"
        write_whole(file, json.dumps(_read(file) | done, indent=1, ensure_ascii=False) + "\n")


def _read(file) -> dict:
    try:
        return json.loads(file.read_text())
    except (OSError, ValueError):
        return {}


def card() -> Any:
    """The progress card: the open chapter exercise by exercise, the other chapters in one line each; one line if all is open."""
    from .show import Table

    chapter = running._current
    kept = {}
    for file in sorted((_folder()).glob("*.json")):
        kept |= _read(file)
    kept |= {n: e for n, e in chapter.exercises.items() if e["tries"] or n not in kept}
    mine = [n for n in book() if n in chapter.exercises]
    if not any(kept[n]["tries"] for n in mine):
        return Told("open", (f"Exercises: none of {len(mine)} answered; run this cell again after you have.",))
    rows = [(f"{n} {book()[n]['title']}", _word(kept[n])) for n in mine]
    for number in dict.fromkeys(n.split(".")[0] for n in book()):
        ones = [n for n in book() if n.split(".")[0] == number]
        right = sum(kept.get(n, {}).get("state") == "right" for n in ones)
        rows.append((f"chapter {int(number):02}", "■" * right + "□" * (len(ones) - right) + f" {right} of {len(ones)}"))
    total = sum(e["state"] == "right" for e in kept.values())
    return Table(rows, ["exercise", "so far"], f"Your card: {total} of {len(book())} exercises of the book are right")


def _word(entry: dict) -> str:
    tries = len(entry["tries"])
    word = {"right": "✓ right", "wrong": "✗ not yet", "open": "○ open"}[entry["state"]]
    return word + (f", {tries} {'try' if tries == 1 else 'tries'}" if tries else "")


def summary() -> dict[str, Any]:
    """For the chapter's JSON: how many exercises it has, and those that were answered."""
    done = running._current.exercises
    return {
        "of": len(done),
        "right": sum(e["state"] == "right" for e in done.values()),
        "answered": {n: e for n, e in done.items() if e["tries"]},
    }
