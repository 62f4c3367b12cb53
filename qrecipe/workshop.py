"""For a teacher: a key for each seat, a seat set back, the answer key as a file, and the class seen from /metrics."""

import asyncio
import hashlib
import json
import math
import os
import re
import secrets
import shlex
import time
from collections import defaultdict
from contextlib import nullcontext
from html import escape
from pathlib import Path

from .errors import BadInput
from .paths import project_root, read_record, state_dir, write_whole

FLAGS = ("--middleware", "qrecipe.workshop.Seats")  # words of `vllm serve`


def seat_keys(count: int, renew: int = 0) -> dict[int, str]:
    """The keys of seats 1 to `count`, kept in seats.json of the state folder (mode 600); those missing are made, and that of `renew`."""
    file = state_dir() / "seats.json"
    keys = {int(n): key for n, key in json.loads(file.read_text()).items()} if file.is_file() else {}
    keys.pop(renew, None)
    keys |= {n: secrets.token_urlsafe(12) for n in range(1, count + 1) if n not in keys}
    write_whole(file, json.dumps(dict(sorted(keys.items())), indent=1), mode=0o600)
    return keys


class Seats:
    """ASGI middleware of `vllm serve`: a seat's key counts as the server's own (VLLM_API_KEY).

    vLLM 0.27.0 takes several keys only as words of its command line, which everybody on the machine can read and which its
    log repeats. The file of the keys is read again whenever it has changed, so a renewed key holds from the next request.
    A seat has at most $QRECIPE_SEAT_REQUESTS requests (16) at work at once; what is beyond waits here, and not before everybody.
    """

    def __init__(self, app):
        self.app, self.file, self.written, self.seats = app, state_dir() / "seats.json", None, set()
        most = int(os.environ.get("QRECIPE_SEAT_REQUESTS", "16"))
        self.places = defaultdict(lambda: asyncio.Semaphore(most))

    async def __call__(self, scope, receive, send):
        place = nullcontext()
        if scope["type"] in ("http", "websocket"):
            own = f"Bearer {os.environ.get('VLLM_API_KEY', '')}".encode()
            seats = [v for n, v in scope["headers"] if n == b"authorization" and self.knows(v)]
            if seats and scope.get("method") == "POST":
                place = self.places[seats[0]]
            scope = scope | {"headers": [(n, own if v in seats else v) for n, v in scope["headers"]]}
        async with place:
            await self.app(scope, receive, send)

    def knows(self, header: bytes) -> bool:
        """True for the Authorization header of a seat."""
        try:
            if (written := self.file.stat().st_mtime_ns) != self.written:
                self.seats = {digest(f"Bearer {key}".encode()) for key in json.loads(self.file.read_text()).values()}
                self.written = written
        except (OSError, ValueError, AttributeError):  # without a readable file no seat is known
            self.written, self.seats = None, set()
        return digest(header) in self.seats


def digest(text: bytes) -> bytes:
    """What a key is compared by, so that how long it takes tells nothing of it."""
    return hashlib.sha256(text).digest()


def reset(seat: int, runs: str | Path = "") -> list[str]:
    """Set a seat back: it gets a new key, and where `runs` (its folder of runs) is given, its answers are taken away.

    Returns the chapters whose answers were removed. Raises BadInput for a seat without a key, and for a folder that is not there.
    """
    keys = seat_keys(0)
    if seat not in keys:
        raise BadInput(f"seat {seat} has no key: expected one of the {len(keys)} seats in {state_dir() / 'seats.json'}")
    if runs and not Path(runs).is_dir():
        raise BadInput(f"there is no folder {runs}: expected the seat's folder of runs (its QRECIPE_RUNS)")
    files = sorted(Path(runs).glob("**/exercises/[0-9]*.json")) if runs else []
    for file in files:
        file.unlink()
    seat_keys(max(keys), renew=seat)
    return [file.stem for file in files]


def write_slips(line: str, keys: dict[int, str]) -> Path:
    """A page to print and cut, slips.html beside seats.json (mode 600): for each seat `line` with its key in the place of the dots."""
    told = {n: escape(line.replace("...", shlex.quote(key), 1)) for n, key in keys.items()}
    style = "pre{break-inside:avoid;border:1px dashed;padding:1em;white-space:pre-wrap}"
    slips = "\n".join(f"<pre>Seat {n}\n\n{text}</pre>" for n, text in told.items())
    path = state_dir() / "slips.html"
    write_whole(
        path, f"<!doctype html><meta charset=utf-8><title>Seats</title><style>{style}</style>\n{slips}\n", mode=0o600
    )
    return path


def progress(folder: Path) -> list[tuple]:
    """A row for each seat from its cards of exercises, found below its own folder in `folder`: its name, how many are right, those not
    yet right with their tries, minutes since the last try; the longest silence first, seats without a card before them."""
    rows = []
    for seat in sorted(p for p in folder.iterdir() if p.is_dir()):
        files = sorted(seat.glob("**/exercises/[0-9]*.json"), key=lambda p: p.stat().st_mtime)
        done = {n: e for file in files for n, e in read_record(file).items() if isinstance(e, dict) and e.get("tries")}
        open_ = ", ".join(f"{n} ({len(e['tries'])})" for n, e in sorted(done.items()) if e.get("state") != "right")
        since = (time.time() - files[-1].stat().st_mtime) / 60 if files else math.inf
        rows.append((seat.name, sum(e.get("state") == "right" for e in done.values()), open_, since))
    rows.sort(key=lambda row: -row[3])
    return [(*row, "no card" if since == math.inf else round(since)) for *row, since in rows]


def recorded_values(spec: dict) -> dict:
    """What the notebook passes to an exercise's check where that is the same for every reader, and `right` where it follows."""
    from .exercise import evaluate
    from .log_source import recorded
    from .memory import budget, longest_of
    from .shape import load_shape
    from .startup_log import read_log
    from .vision import image_tokens

    env = {"shape": load_shape("Qwen3.5-4B"), "budget": budget, "longest_of": longest_of, "image_tokens": image_tokens}
    env["log"] = lambda name: read_log(recorded(name))
    values = {name: evaluate(text, env) for name, text in spec.get("recorded", {}).items()}
    if "right" in spec and "key" not in spec:
        values["right"] = evaluate(spec["right"], values | {"ceil": math.ceil})
    return values


def write_key(path: Path) -> Path:
    """Write every exercise as Markdown: question, hint, worked solution, what usual mistakes come from; a solution that needs the
    student's own run says so in words."""
    from .exercise import book, say

    cells = [c for p in project_root().glob("notebooks/0*.ipynb") for c in json.loads(p.read_text())["cells"]]
    told = [re.match(r"### Exercise (\d\.\d):[^\n]*\n+(.*)", "".join(c["source"]), re.S) for c in cells]
    asked = {found[1]: found[2] for found in told if found}
    lines = ["# Answer key", ""]
    for name, spec in book().items():
        env = recorded_values(spec) | {"ceil": math.ceil}
        lines += [f"## {name} {spec['title']}", "", asked.get(name, ""), "", f"**Hint.** {say(spec['hint'], env)}", ""]
        lines += [f"**Solution.** {spec.get('key') or say(spec['solution'], env)}", ""]
        if usual := [f"- {text}" for _, text in spec.get("mistakes", []) if "{" not in text]:
            lines += ["**After a usual mistake.**", "", *usual, ""]
    write_whole(path, "\n".join(lines), mode=0o600)
    return path


def watch(base_url: str, seconds: float = 10.0, every: float = 1.0) -> list[tuple]:
    """The class at work: a row of /metrics (open without a key) every `every` seconds for `seconds`, drawn in place; the rows."""
    from IPython.display import DisplayHandle

    from .metrics import read_metrics
    from .show import table

    columns = ["seconds", "running", "waiting", "KV cache in use", "answered", "tokens a second"]
    rows, handle, began, since, before = [], DisplayHandle(), time.monotonic(), 0.0, None
    while not rows or since + every < seconds:
        time.sleep(every if rows else 0)
        page, now = read_metrics(base_url), time.monotonic() - began
        tokens = page["generation_tokens_total"]
        rate = 0.0 if before is None else (tokens - before) / (now - since)
        running, waiting, used = (
            page[n] for n in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
        )
        rows.append((round(now), int(running), int(waiting), f"{used:.1%}", page.finished, round(rate)))
        (handle.update if rows[1:] else handle.display)(table(rows[-12:], columns))
        since, before = now, tokens
    return rows
