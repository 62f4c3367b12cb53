"""A server's start while one waits for it: the stages of its log as a bar, in a notebook or on a terminal."""

import html
import json
import sys
import time
from pathlib import Path

from .paths import state_dir, write_whole
from .startup_log import StageWatcher

WORDS = {
    "import": "importing vLLM",
    "config": "reading the configuration",
    "load": "loading the weights",
    "compile": "compiling",
    "profile": "measuring memory",
    "graphs": "capturing CUDA graphs",
    "warmup": "warming up",
    "ready": "ready",
}


class StartProgress:
    """Called by `Server.start` about four times a second; draws once a second. Keeps the seconds of each stage."""

    def __init__(self, engine: str):
        self.engine, self.watcher, self.offset, self.drawn = engine, StageWatcher(), 0, 0.0
        self.stages: list[tuple[str, float]] = [("import", 0.0)]
        self.file = state_dir() / "start-times.json"
        self.last = _last_times(self.file).get(engine)
        self.handle = None

    def __call__(self, seconds: float | None, log: Path) -> None:
        self._read(log, seconds)
        if seconds is None:  # ready
            if len(self.stages) > 1 and self.stages[-1][0] != "ready":
                self.stages.append(("ready", self.seconds))
            if self.seconds:  # not when it joined a server that was ready
                write_whole(self.file, json.dumps(_last_times(self.file) | {self.engine: self.seconds}))
        else:
            self.seconds = seconds
        if seconds is None or time.monotonic() - self.drawn >= 1:
            self.drawn = time.monotonic()
            self._draw(done=seconds is None)

    seconds = 0.0

    def _read(self, log: Path, seconds: float | None) -> None:
        try:
            with open(log, "rb") as f:
                f.seek(self.offset)
                data = f.read()
        except OSError:
            return
        whole = data.rfind(b"\n") + 1
        self.offset += whole
        for line in data[:whole].decode("utf-8", "replace").splitlines():
            stage = self.watcher.feed(line)
            if stage and stage not in [name for name, _ in self.stages]:
                self.stages.append((stage, seconds if seconds is not None else self.seconds))

    def _draw(self, done: bool) -> None:
        share = 1.0 if done else min(0.99, self.seconds / self.last) if self.last else None
        stage = WORDS.get(self.stages[-1][0], self.stages[-1][0])
        if done:
            text = (
                f"server ready, {self.seconds:.0f} s after its start"
                if self.seconds
                else "joined the server that was ready"
            )
        elif self.last:
            text = f"{self.seconds:.0f} s: {stage} (the last start here took {self.last:.0f} s)"
        else:
            text = f"{self.seconds:.0f} s: {stage} (first start here: allow 3 minutes on two cores, 8 on a GPU)"
        if _in_notebook():
            self._show(share, text)
        elif sys.stderr.isatty():
            sys.stderr.write(f"\r\033[K{text}" + ("\n" if done else ""))
            sys.stderr.flush()
        elif done:
            print(text, file=sys.stderr)

    def _show(self, share: float | None, text: str) -> None:
        from IPython.display import HTML, display

        width = 100 * share if share is not None else 100
        shade = (
            "#0072b2"
            if share is not None
            else "repeating-linear-gradient(45deg,#0072b2,#0072b2 8px,#56b4e9 8px,#56b4e9 16px)"
        )
        bar = HTML(
            f'<div role="progressbar" aria-label="{html.escape(text)}" style="max-width:40em;font:14px sans-serif">'
            f'<div style="background:#ddd;height:12px"><div style="width:{width:.0f}%;height:12px;background:{shade}"></div></div>{html.escape(text)}</div>'
        )
        if self.handle is None:
            self.handle = display(bar, display_id=True)
        else:
            self.handle.update(bar)


def _last_times(file: Path) -> dict:
    try:
        times = json.loads(file.read_text())
        return {k: float(v) for k, v in times.items() if float(v) > 0}
    except (OSError, ValueError, TypeError, AttributeError):
        return {}


def _in_notebook() -> bool:
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython else None
    return shell is not None and hasattr(shell, "kernel")
