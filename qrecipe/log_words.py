"""The words of vLLM's start-up log (data/log_words.toml), and a log's text without colours, prefixes and line breaks.

A figure is found by its words, wherever they stand in the line. A rule has an *anchor* (a short literal that a fast
byte search can look for), what must stand left of it, and what must follow. Spaces stand for any white space, also a
line break: `clean` has made one space of it before a rule is tried.
"""

import re
import tomllib
from pathlib import Path
from typing import NamedTuple

TABLE = tomllib.loads((Path(__file__).parent / "data" / "log_words.toml").read_text(encoding="utf-8"))
PLACEHOLDERS = {
    "<n>": r"(-?\d[\d,]{0,20}(?:\.\d{1,12})?)",
    "<name>": r"([A-Za-z][\w.+/-]{0,60})",
    "<version>": r"(\d[\w.+-]{0,40})",
}
JSON_KEYS, MORE_KEYS, ENGINE_SETTINGS = TABLE["keys"], TABLE["more keys"], TABLE["settings"]
RANK_FIELDS, WHOLE, SMALLEST = TABLE["by rank"], TABLE["whole"], TABLE["smallest"]


class Rule(NamedTuple):
    """`names`: the figures in the order of their numbers, or the one name or backend that is told."""

    names: list[str]
    left: re.Pattern
    right: re.Pattern  # from the anchor on
    is_figure: bool


def _rules() -> dict[bytes, list[Rule]]:
    rules: dict[bytes, list[Rule]] = {}
    for kind in ("figures", "names"):
        for names, words in TABLE[kind]:
            for placeholder, pattern in PLACEHOLDERS.items():
                words = words.replace(placeholder, pattern)
            left, anchor, right = re.split("[«»]", words)
            rule = Rule(
                names.split() if kind == "figures" else [names],
                re.compile(f"{left}$"),
                re.compile(re.escape(anchor) + right),
                kind == "figures",
            )
            rules.setdefault(anchor.encode(), []).append(rule)
    return rules


RULES = _rules()  # by anchor
NEAR = {a.encode(): re.compile("|".join(map(re.escape, words)).encode()) for a, words in TABLE["near"].items()}


def is_near(anchor: bytes, around: bytes) -> bool:
    """Whether these surroundings of an anchor can hold one of its figures."""
    return anchor not in NEAR or NEAR[anchor].search(around) is not None


STAGES = ("import", "config", "load", "compile", "profile", "graphs", "warmup", "ready")
STAGE_WORDS = {words.encode(): stage for words, stage in TABLE["stages"]}
EAGER, ARGUMENTS, ERRORS, STOPPED = (
    tuple(words.encode() for words in TABLE[kind]) for kind in ("eager", "arguments", "errors", "stopped")
)
METRICS = b"Avg prompt throughput"
METRIC_WORDS = {name: re.compile(words) for name, words in TABLE["metrics"].items()}


def _pattern(name: str) -> str:
    words = "".join(TABLE["patterns"][name])
    for part in ("prefix", "level"):
        words = words.replace(f"<{part}>", "".join(TABLE["patterns"][part]))
    return words


PATTERNS = {name: re.compile(_pattern(name)) for name in TABLE["patterns"]}
LABEL, TIME = (re.compile(_pattern(name).encode()) for name in ("process", "time"))
RECORD, ESCAPES = PATTERNS["record"], ("\x1b", "\\u001b", "\\u001B", "\\x1b", "\\033")


def is_quiet(line: str, at: int | None = None) -> bool:
    """Whether the error's words (at `at`, else the first in the line) report no error: by vLLM's own level, the last one
    where a collector put its own before."""
    at = at if at is not None else found.start() if (found := PATTERNS["error"].search(line)) else 40
    levels = PATTERNS["level and time"].findall(line[: at + 30])
    return PATTERNS["quiet"].search(levels[-1] if levels else line[:at]) is not None


def plain(text: str) -> str:
    """The text without terminal colours, also where JSON escaped them or the escape character was lost."""
    if any(sign in text for sign in ESCAPES):  # a cheap look before the close one
        text = PATTERNS["colour"].sub("", text)
    return PATTERNS["colour without its escape"].sub("", text) if "[" in text else text


def clean(raw: bytes) -> str:
    """One line of plain text: colours, escapes, line breaks and the prefixes after them gone; white space single."""
    text = plain(raw.decode("utf-8", "replace"))
    if "\n" in text or "\\n" in text:
        text = PATTERNS["break"].sub(" ", text)
    return PATTERNS["spaces"].sub(" ", text.replace('\\"', '"'))


def message(line: str) -> str:
    """The message of a log line without colours and the logger's prefix; leading blanks of it are kept."""
    text = plain(line).rstrip("\r\n")
    found = PATTERNS["JSON message" if text.lstrip().startswith("{") else "logfmt message"].search(text)
    if found:
        text = found[1].replace('\\"', '"').replace("\\n", "")
    return text[PATTERNS["prefix"].match(text).end() :]
