"""A server's start while one waits for it: the stages of its log as a bar, in a notebook or on a terminal."""

import html
import json
import sys
import time
from contextlib import suppress
from pathlib import Path

from .chapter import load_ahead, shell
from .paths import read_record, state_dir, write_whole
from .startup_log import StageWatcher


class StartProgress:
    """Called by `Server.start` about four times a second; draws once a second, with the time of the last start as measure."""

    def __init__(self, engine: str):
        self.engine, self.watcher, self.stages = engine, StageWatcher(), ["import"]
        self.offset, self.seconds, self.drawn, self.bar = 0, 0.0, 0.0, None
        self.file = state_dir() / "start-times.json"
        self.last = read_record(self.file).get(engine)

    def __call__(self, seconds: float | None, log: Path) -> None:
        """`seconds` since the start, None when the server is ready."""
        self.seconds = self.seconds if seconds is None else seconds
        self._read(log)
        if not self.drawn and seconds is not None:  # the client of the cells that follow
            load_ahead("openai")
        if seconds is None and self.seconds:  # not when it joined a server that was ready
            write_whole(self.file, json.dumps(read_record(self.file) | {self.engine: self.seconds}))
        if seconds is None or time.monotonic() - self.drawn >= 1:
            self.drawn = time.monotonic()
            self._draw(done=seconds is None)

    def _read(self, log: Path) -> None:
        with suppress(OSError), open(log, "rb") as f:
            f.seek(self.offset)
            lines, end, _ = f.read().rpartition(b"\n")
            self.offset += len(lines + end)
            stages = map(self.watcher.feed, lines.decode("utf-8", "replace").splitlines())
            self.stages += [stage for stage in dict.fromkeys(stages) if stage and stage not in self.stages]

    def _draw(self, done: bool) -> None:
        if done:
            text = (
                f"server ready, {self.seconds:.0f} s after its start"
                if self.seconds
                else "joined the server that was ready"
            )
        else:
            measure = "first start here: allow 3 minutes on two cores, 8 on a GPU"
            measure = f"the last start here took {self.last:.0f} s" if self.last else measure
            text = f"{self.seconds:.0f} s: {self.stages[-1]} ({measure})"
        if hasattr(shell(), "kernel"):
            self._show(1.0 if done else min(0.99, self.seconds / self.last) if self.last else None, text)
        elif sys.stderr.isatty():
            print(f"\r\033[K{text}", end="\n" if done else "", file=sys.stderr, flush=True)
        elif done:
            print(text, file=sys.stderr)

    def _show(self, share: float | None, text: str) -> None:
        from IPython.display import HTML, display

        value = "" if share is None else f'value="{share:.2f}"'  # without one the bar says only that something goes on
        text = html.escape(text)
        page = HTML(f'<progress {value} aria-label="{text}" style="width:40em;max-width:100%"></progress><br>{text}')
        if self.bar is None:
            self.bar = display(page, display_id=True)
        else:
            self.bar.update(page)
