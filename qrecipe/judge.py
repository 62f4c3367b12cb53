"""The verdict on an executed chapter, by what it holds and not by what papermill says of it.

A chapter passes when papermill's exit code is 0 AND every code cell has an execution count AND the closing line was
printed AND its JSON is there. papermill's own status fields are not asked: after a dead kernel they say "completed".
A chapter that says it cannot run here (`qrecipe.skip`) is skipped: neither passed nor failed.
"""

import re
from dataclasses import dataclass, field
from pathlib import Path

import nbformat

from .chapter import CLOSING, SKIPPED
from .checks import CONTROL
from .paths import read_record

DEAD = 138  # papermill's exit code for a dead kernel


@dataclass
class Verdict:
    """How one chapter ended: passed, failed or skipped; a failed one names its cell, the line, why, and what mends it."""

    name: str
    status: str = "failed"
    seconds: float = 0.0
    reason: str = ""
    cell: str = ""
    line: str = ""
    mend: str = ""
    log_tail: str = ""  # the server log's last lines when the chapter failed
    measured: dict = field(default_factory=dict)
    exercises: str = ""  # how its answers to the exercises were judged, where any were given


def judge(executed: Path, record: Path, exit_code: int | None) -> Verdict:
    """The verdict on an executed copy and the NAME.json that it wrote."""
    verdict, told = Verdict(executed.stem), read_record(record)
    try:
        nb = nbformat.read(executed, as_version=4)
    except Exception as e:
        verdict.reason = f"no readable output notebook ({type(e).__name__})"
        return verdict
    code = [c for c in nb.cells if c.cell_type == "code" and c.source.strip()]
    for cell in code:
        for output in cell.outputs:
            if output.output_type == "error":
                verdict.cell, verdict.reason = cell.get("id", ""), plain(f"{output.ename}: {output.evalue}")
                verdict.line = failing_line(cell, output)
                return verdict
    printed = "".join(o.get("text", "") for c in code for o in c.outputs if o.output_type == "stream").splitlines()
    unrun = [c for c in code if c.execution_count is None]
    skipped = SKIPPED.format(name=executed.stem) in printed and told.get("status") == "skipped"
    verdict.exercises = answered(told.get("exercises"))
    checks = [
        (unrun, f"{len(unrun)} of {len(code)} cells were not run (the kernel died or a limit was reached)"),
        (exit_code == DEAD, "the kernel died"),
        (exit_code != 0, f"papermill ended with exit code {exit_code}"),
        (not skipped and CLOSING.format(name=executed.stem) not in printed, "the closing line was not printed: finish() was not reached"),
        (not isinstance(told.get("measured"), dict), f"{record.name} was not written, or is damaged"),
        (told.get("chapter") != executed.stem, f"{record.name} is of chapter {told.get('chapter')!r}"),
    ]  # fmt: skip
    verdict.reason = next((reason for broken, reason in checks if broken), "")
    if code and (unrun or exit_code):  # which cell it was in, papermill does tell
        begun = [c for c in code if (c.metadata.get("papermill") or {}).get("start_time")]
        last = begun[-1] if begun else (unrun or code)[0]
        verdict.cell, verdict.line = last.get("id", ""), begins(last.source)
    elif not verdict.reason:
        verdict.status, verdict.measured = ("skipped" if skipped else "passed"), told["measured"]
        verdict.reason = told.get("why", "") if skipped else ""
    return verdict


def answered(told: dict | None) -> str:
    """How a chapter's answers were judged, as "1 right, 1 wrong (2.1)"; "" where none was given."""
    states: dict[str, list[str]] = {}
    for number, one in (told or {}).get("answered", {}).items():
        states.setdefault(one["state"], []).append(number)
    words = {"right": "right", "wrong": "wrong", "open": "not judged"}
    named = ((word, states[state]) for state, word in words.items() if state in states)
    return ", ".join(f"{len(ns)} {word}" + (f" ({', '.join(ns)})" if word != "right" else "") for word, ns in named)


def plain(text: str) -> str:
    """Text of a traceback without colours and what else steers a terminal, 2,000 characters at most."""
    return CONTROL.sub("", re.sub(r"\x1b\[[0-9;]*m", "", text)).strip()[:2000]


def begins(source: str) -> str:
    """A cell by its first line, where nobody knows in which line it ended."""
    first, *more = source.splitlines()
    return first + (" ..." if more else "")


def failing_line(cell, output) -> str:
    """The line of the cell that a traceback's last arrow into it points at, else how the cell begins."""
    own = {line.strip() for line in cell.source.splitlines()}
    for line in reversed("\n".join(output.traceback).splitlines()):
        if (m := re.match(r"-+>\s*\d+\s(.*)", plain(line))) and m[1].strip() in own:
            return m[1].strip()
    return begins(cell.source)
