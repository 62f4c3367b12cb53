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
RANK_FIELDS, WHOLE, SMALLEST = TABLE["by rank"], TABLE["whole"], TABLE["smallest"]
ENGINE_SETTINGS = TABLE["settings"]


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

_ANSI = re.compile(r"(?:\x1b|\\u001b|\\x1b|\\033)\[[0-9;?]{0,20}[A-Za-z]", re.I)
_ANSI_SIGNS = ("\x1b", "\\u001b", "\\u001B", "\\x1b", "\\033")
_BARE = re.compile(r"\[(?:\d{1,2}(?:;\d{1,3}){0,4})?m")  # a colour whose escape character was lost on the way
_LEVEL = r"(?:DEBUG|INFO|WARNING|ERROR|CRITICAL)"
PREFIX = (  # what loggers and containers put before a message
    r"(?: {0,4}[\w./-]{0,60} *\| ?)?"  # compose
    r"(?:\S{3,5} +\d{1,2} \d\d:\d\d:\d\d \S{1,60} \S{1,60}\[\d{1,9}\]: )?"  # journald
    r"(?:\[?\d{4}-\d\d-\d\d[T ][\d:.,]{8,20}(?:Z|[+-]\d\d:?\d\d)?\]? ?(?:- )?)?(?:std(?:out|err) [FP] )?"
    r"(?:\((?:APIServer|ApiServer|EngineCore|Worker|VllmWorker|Ray|LLM|DPCoord)[^()\n]{0,60}\) ?)?"
    rf"(?:{_LEVEL}:? (?:\d\d-\d\d \d\d:\d\d:\d\d )?(?:\[?[\w./-]{{1,80}}\.(?:py|cpp):\d{{1,6}}\] ?)?)?"
)
_BREAK = re.compile(r"(?:\r?\n|\\r\\n|\\n)" + PREFIX + r"[ \t]*")
_START = re.compile(PREFIX)
_SPACES = re.compile(r"[\t\r\n\u00a0]+ *| {2,}")
LABEL = re.compile(rb"\(((?:EngineCore|Worker|VllmWorker|Ray\w*Worker)[^()\n]{0,60})\)")
RECORD = re.compile(
    rf"(?m)(?:^|[\s>)\"|]){_LEVEL}:? .{{0,40}}?\[?[\w./-]+\.(?:py|cpp):\d+\]|\((?:APIServer|EngineCore|Worker)\w* ?[^()\n]*\)"
)
TIME = re.compile(rb"(\d{4}-)?[01]\d-[0-3]\d[T ][0-2]\d:[0-5]\d:[0-6]\d(?:[.,]\d{1,9})?")
_LEVEL_AND_TIME = re.compile(rf"\b{_LEVEL}:? \[?(?:\d{{4}}-)?\d\d-\d\d[ T]\d\d:")
_WORD = re.compile("Error|ERROR|Exception")
_QUIET = re.compile(r"\b(?:DEBUG|INFO|WARNING)\b")


def is_quiet(line: str, at: int | None = None) -> bool:
    """Whether the error's words (at `at`, else the first in the line) report no error: by vLLM's own level, the last one
    where a collector put its own before."""
    at = at if at is not None else found.start() if (found := _WORD.search(line)) else 40
    levels = _LEVEL_AND_TIME.findall(line[: at + 30])
    return _QUIET.search(levels[-1] if levels else line[:at]) is not None


def plain(text: str) -> str:
    """The text without terminal colours, also where JSON escaped them or the escape character was lost."""
    if any(sign in text for sign in _ANSI_SIGNS):
        text = _ANSI.sub("", text)
    return _BARE.sub("", text) if "[" in text else text


def clean(raw: bytes) -> str:
    """One line of plain text: colours, escapes, line breaks and the prefixes after them gone; white space single."""
    text = plain(raw.decode("utf-8", "replace"))
    if "\n" in text or "\\n" in text:
        text = _BREAK.sub(" ", text)
    return _SPACES.sub(" ", text.replace('\\"', '"'))


def message(line: str) -> str:
    """The message of a log line without colours and the logger's prefix; leading blanks of it are kept."""
    text = plain(line).rstrip("\r\n")
    if text.lstrip().startswith("{"):
        found = re.search(r'"(?:log|msg|message)"\s*:\s*"((?:[^"\\]|\\.)*)', text)
    else:
        found = re.search(r'\bmsg="((?:[^"\\]|\\.)*)', text)
    if found:
        text = found[1].replace('\\"', '"').replace("\\n", "")
    return text[_START.match(text).end() :]
