"""One streaming reader of vLLM start-up logs: the memory profile, the timings, the backends, or the failure.

Reads in blocks with constant memory, whatever the size: a fast byte search finds the anchors of `log_words`, and
only their surroundings are looked at closely. Not covered: binary formats, and logs of other servers.
Units: GiB is 2^30 bytes. A figure that the log does not hold is None, never guessed.
"""

import ast
import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from datetime import datetime
from pathlib import Path
from typing import IO, Any

from . import log_words as words
from .errors import BadInput
from .log_source import blocks
from .log_words import JSON_KEYS, MORE_KEYS

LEFT, RIGHT, KEPT, ROWS = 1024, 16384, 40, 2000  # bytes around an anchor; error lines at each end; metric rows
PRINTED_DICT = re.compile(r"'(\w{1,60})': ('[^'\n]{0,400}'|\[[^\[\]\n]{0,400}\]|\{[^{}\n]{0,400}\}|[\w.+-]{1,60})")
SETTINGS = re.compile(r"\b(\w{1,60})=('[^'\n]{0,400}'|\[[^\[\]\n]{0,400}\]|[\w.+-]{1,60})(?=[,)]|$)")
ENCODER, COMPILED, CACHED = b"Encoder cache will be", b"saved AOT compiled", b"Directly load"
STAGE_ANCHORS = {*words.STAGE_WORDS, *words.EAGER, ENCODER}
ANCHORS = list(
    dict.fromkeys(
        [*words.RULES, *STAGE_ANCHORS, *words.ARGUMENTS, *words.ERRORS, *words.STOPPED, words.METRICS, COMPILED, CACHED]
    )
)
STARTING = [b" GiB", b"non-default args", b"with config", b"startup complete", b"args: Namespace("]
SERVING = [words.METRICS, *words.ERRORS[:2]]  # all that is looked for in a long run of requests
FATAL = re.compile(r"EngineDead|fatal|died|OutOfMemory|out of memory")


@dataclass
class StartupLog:
    """What one start of vLLM said about itself. Every figure is an attribute, None if absent; `lines` has its log line."""

    figures: dict[str, Any]
    ranks: list[dict[str, Any]]
    ready: bool
    backends: dict[str, str] = field(default_factory=dict)
    flags: dict[str, Any] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)
    stages: list[tuple[str, float | None]] = field(default_factory=list)
    runtime: list[dict[str, Any]] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    lines: dict[str, str] = field(default_factory=dict)
    compile_cached: bool | None = None

    def __getattr__(self, name: str) -> Any:
        if name in JSON_KEYS or name in MORE_KEYS:
            return self.figures.get(name)
        raise AttributeError(f"a start-up log has no figure called {name!r}")

    @property
    def failure(self) -> dict[str, Any] | None:
        """The cause line, its cause and its mend when the start failed or the server died; None otherwise."""
        if not self.errors:
            return None
        from .diagnosis import diagnose  # later in the data flow: only a failed start needs it

        found = diagnose(self.errors, log=self)
        return found and asdict(found)

    def as_dict(self) -> dict[str, Any]:
        """The JSON of `qrecipe log`."""
        out = {key: self.figures.get(key) for key in JSON_KEYS}
        out |= {"ranks": self.ranks, "ready": self.ready, "failure": self.failure}
        out |= {key: self.figures.get(key) for key in MORE_KEYS}
        more = ("backends", "flags", "config", "stages", "compile_cached", "runtime")
        return out | {key: getattr(self, key) for key in more}


class StageWatcher:
    """Follows a start line by line: `feed(line)` gives the name of the stage that the line opens, else None."""

    def __init__(self) -> None:
        self.stage = "import"
        self.eager = False

    def feed(self, line: str | bytes) -> str | None:
        raw = line.encode("utf-8", "replace") if isinstance(line, str) else line
        self.eager = self.eager or any(w in raw for w in words.EAGER)
        named = [stage for word, stage in words.STAGE_WORDS.items() if word in raw]
        named += ["profile"] if self.eager and ENCODER in raw else []
        now = words.STAGES.index(self.stage)
        opened = next((stage for stage in named if words.STAGES.index(stage) > now), None)  # stages never go back
        self.stage = opened or self.stage
        return opened


def pairs(pattern: re.Pattern, text: str) -> dict[str, Any]:
    """The settings printed in a line: name → value, by its Python literal where it is one."""
    found = {}
    for name, value in pattern.findall(text):
        value = value.removeprefix("torch.")
        try:
            found[name] = ast.literal_eval(value)
        except (ValueError, SyntaxError, RecursionError, MemoryError, TypeError):
            found[name] = value
    return found


class _Start:
    """What has been read of one start so far: `log` grows as it is read, `finish` completes it."""

    def __init__(self) -> None:
        self.log = StartupLog({}, [], False)
        self.values: dict[str, dict[str, list]] = {}  # figure -> process label -> values
        self.watcher = StageWatcher()
        self.origin: datetime | None = None
        self.engines: set[str] = set()
        self.owed: list[bytes] = []  # process labels whose line comes without one
        self.row_count, self.stride, self.stopped = 0, 1, False

    def add(self, name: str, label: str, number: str) -> None:
        value = float(number.replace(",", ""))
        kept = self.values.setdefault(name, {}).setdefault(label if name in words.RANK_FIELDS else "", [])
        if value not in kept and len(kept) < 1024:
            kept.append(int(value) if name in words.WHOLE else value)

    def seconds(self, raw: bytes) -> float | None:
        """Seconds of this line's time after the first time in the log."""
        found = words.TIME.search(raw)
        try:
            at = datetime.fromisoformat(("" if found[1] else "2000-") + found[0].decode())
        except (TypeError, ValueError):
            return None
        self.origin = self.origin or at
        since = (at - self.origin).total_seconds()
        return round(since, 3) if since >= 0 else None

    def metric(self, buf: bytes, begin: int, at: int) -> None:
        self.row_count += 1
        if self.row_count % self.stride:
            return
        row: dict[str, Any] = {"seconds": self.seconds(buf[begin:at])}
        line = words.clean(buf[at : at + 400])
        for name, pattern in words.METRIC_WORDS.items():
            found = pattern.search(line)
            row[name] = float(found[1]) if found else None
        self.log.runtime.append(row)
        if len(self.log.runtime) >= ROWS:  # constant memory: every other row goes, evenly
            del self.log.runtime[::2]
            self.stride *= 2

    def stage(self, buf: bytes, begin: int, at: int, anchor: bytes) -> None:
        line = buf[begin : at + len(anchor) + 4]
        if not self.log.stages:
            self.log.stages.append(("import", self.seconds(line)))
        if stage := self.watcher.feed(line):
            if not words.TIME.search(line):  # uvicorn's own lines carry no time: the last one before counts
                line = b"\n".join(reversed(buf[max(0, begin - LEFT) : begin].split(b"\n")))
            self.log.stages.append((stage, self.seconds(line)))
            self.log.ready = self.log.ready or stage == "ready"

    def apply(self, buf: bytes, begin: int, at: int, anchor: bytes) -> None:
        """The figures and names of an anchor, by the rules that hold for it here."""
        before, after = words.clean(buf[max(0, at - 240) : at]), words.clean(buf[at : at + 240])
        for rule in words.RULES[anchor]:
            right = rule.right.match(after)
            left = rule.left.search(before) if right else None
            if not left:
                continue
            groups = [*left.groups(), *right.groups()]
            if not rule.is_figure:
                ((name, value),) = zip(rule.names, filter(None, groups), strict=False)
                texts = self.log.figures if name in ("architecture", "vllm_version", "model") else self.log.backends
                texts.setdefault(name, value)
                continue
            # two processes that wrote at once: both labels, the line of one, then the other's without any
            if labels := words.LABEL.findall(buf[begin:at]):
                self.owed = labels[1:]
            elif self.owed:
                labels = [self.owed.pop(0)]
            line = words.message(buf[begin : at + RIGHT].split(b"\n", 1)[0].decode("utf-8", "replace"))
            for name, number in zip(rule.names, groups, strict=False):
                self.log.lines.setdefault(name, line[:1000])
                if number is not None:
                    self.add(name, labels[0].decode("utf-8", "replace") if labels else "", number)

    def error(self, buf: bytes, begin: int, at: int) -> None:
        end = buf.find(b"\n", at, at + 4096)
        end = end if end >= 0 else min(len(buf), at + 4096)
        if self.stopped or words.is_quiet(buf[begin : at + 30].decode("latin-1"), at - begin):
            return
        text = words.message(buf[begin:end].decode("utf-8", "replace"))
        if not text.strip() or text.startswith((" ", "\t", "^", "Traceback", "INFO")):
            return
        for line in buf[end + 1 : end + 6144].decode("utf-8", "replace").split("\n")[:6]:
            # a wrapped message goes on in lines that are no records of their own
            other = line.lstrip().startswith(("Traceback", "File", "During", "The above", "["))
            if len(text) < 60 or not line.strip() or other or words.RECORD.search(line):
                break
            text = f"{text.rstrip()} {line.strip()}"
        errors, text = self.log.errors, text[:2000]
        if text not in errors:
            del errors[KEPT : len(errors) - KEPT + 1]  # of many the first and the last
            errors.append(text)

    def ranks(self) -> list[dict[str, Any]]:
        """One row a rank. Without process labels, repeated figures of one start are taken as ranks in their order."""
        rows = []
        for label in dict.fromkeys(label for name in words.RANK_FIELDS for label in self.values.get(name, {})):
            found = {name: self.values.get(name, {}).get(label, []) for name in words.RANK_FIELDS}
            count = max(map(len, found.values())) if label == "" else 1
            for i in range(count):
                name = re.split(r"[ ,]", label)[0] or (str(i) if count > 1 else "")
                each = {figure: (v[min(i, len(v) - 1)] if v else None) for figure, v in found.items()}
                rows.append({"rank": name, "process": label, **each})
        return rows

    def finish(self) -> StartupLog:
        log, figures = self.log, self.log.figures
        log.ranks = self.ranks()
        if named := log.config.get("model") or log.flags.get("model"):
            figures.setdefault("model", named)
        sized = [rank for rank in log.ranks if rank["available_kv_gib"] is not None]
        tightest = min(sized, key=lambda rank: rank["available_kv_gib"], default={})
        for name, by_label in self.values.items():
            every = [v for values in by_label.values() for v in values]
            worst = min(every) if name in words.SMALLEST else max(every)
            figures[name] = worst if tightest.get(name) is None else tightest[name]
        if (tokens := self.tokens_from_blocks()) is not None:
            figures.setdefault("kv_cache_tokens", tokens)
        asked = [log.config.get("max_seq_len"), log.flags.get("max_model_len")]
        if said := [n for n in asked if isinstance(n, int)]:
            figures.setdefault("max_model_len", said[0])
        if log.ready and not any(map(FATAL.search, log.errors)):
            log.errors = []
        return log

    def tokens_from_blocks(self) -> int | None:
        """The old engine logs blocks, not tokens: tokens = blocks × block size, where the log fixes the block size."""
        blocks, length, said = (self.log.figures.get(k) for k in ("gpu_blocks", "max_model_len", "max_concurrency"))
        size = self.log.flags.get("block_size")
        if blocks is None:
            return None
        if not isinstance(size, int) and said and length:
            size = next((b for b in (8, 16, 32, 64, 128, 256) if abs(blocks * b / length - said) <= 0.0051), None)
        elif not isinstance(size, int) and (self.log.flags or self.log.config):
            size = 16  # the log lists the flags and block_size is not among them
        return blocks * size if isinstance(size, int) else None


class _Reader:
    """Takes blocks of bytes, keeps the starts found."""

    def __init__(self, every: bool) -> None:
        self.every = every
        self.done: list[StartupLog] = []
        self.start = _Start()
        self.starting = 4  # so many more blocks may belong to a start

    def block(self, buf: bytes, low: int, high: int) -> None:
        """Handles every anchor that begins in buf[low:high]."""
        if not self.every:
            low = self.skip_old_starts(buf, low, high)
        if any(buf.find(sign, low, high) >= 0 for sign in STARTING):
            self.starting = 2
        hits = []
        for anchor in ANCHORS if self.starting > 0 else SERVING:
            found, at = [], buf.find(anchor, low, high)
            while at >= 0:
                found.append((at, anchor))
                at = buf.find(anchor, at + len(anchor), high)
            if len(found) > 100 and anchor in words.ERRORS:  # a flood: its ends are enough
                found = found[:50] + found[-50:]
            hits += found
        self.starting -= 1
        for at, anchor in sorted(hits):
            self.hit(buf, at, anchor)

    def skip_old_starts(self, buf: bytes, low: int, high: int) -> int:
        """Only the last start is wanted: where the last one of this block begins, if another came before it."""
        begin = buf.rfind(words.ARGUMENTS[0], low, high)
        ready = buf.rfind(b"startup complete", low, begin) if begin >= 0 else -1
        if ready < 0:
            return low
        self.start = _Start()
        return ready + 20

    def hit(self, buf: bytes, at: int, anchor: bytes) -> None:
        start = self.start
        begin = buf.rfind(b"\n", max(0, at - LEFT), at) + 1 or max(0, at - LEFT)
        if anchor == words.METRICS:
            start.metric(buf, begin, at)
        elif anchor in words.ERRORS:
            start.error(buf, begin, at)
        elif anchor in words.STOPPED:
            start.stopped = True
        else:
            self.begin_start(buf[begin:at], buf[at : at + RIGHT // 2], anchor)
            if anchor in STAGE_ANCHORS or not self.start.log.stages:
                self.start.stage(buf, begin, at, anchor)
            if anchor in words.RULES and words.is_near(anchor, buf[max(0, at - 240) : at + 120]):
                self.start.apply(buf, begin, at, anchor)

    def begin_start(self, head: bytes, rest: bytes, anchor: bytes) -> None:
        """The lines that tell a start's settings, and with which another one may begin."""
        start = self.start
        banner = anchor == b"version" and ("█".encode() in head or b"API server" in head)
        engine = anchor == b"with config" and b"LLM engine" in head
        label = words.LABEL.search(head) if engine else None
        name = re.split(rb"[ ,]", label[1])[0].decode("ascii", "replace") if label else ""
        if start.log.ready or (name in start.engines if engine else start.values or start.log.errors):
            if anchor in words.ARGUMENTS or banner or engine:
                self.close()
                start = self.start = _Start()
        if engine:
            start.engines.add(name)
            settings = pairs(SETTINGS, words.clean(rest.split(b"\n", 1)[0]))
            start.log.config.update({k: v for k, v in settings.items() if k in words.ENGINE_SETTINGS})
        elif anchor in words.ARGUMENTS:
            kind = PRINTED_DICT if b"non-default" in anchor else SETTINGS
            start.log.flags.update(pairs(kind, words.clean(rest.split(b"\n", 1)[0])))
        elif anchor == COMPILED or (anchor == CACHED and start.log.compile_cached is None):
            start.log.compile_cached = anchor == CACHED

    def close(self) -> None:
        self.done = [*self.done, self.start.finish()] if self.every else [self.start.finish()]


def read_log(source: str | Path | IO | Iterable[str | bytes]) -> StartupLog:
    """The last start in a log: a path, an open file, or lines. A path that holds no vLLM log raises BadInput."""
    return _read(source, every=False)[-1]


def read_all(source: str | Path | IO | Iterable[str | bytes]) -> list[StartupLog]:
    """Every start in a log, oldest first."""
    return _read(source, every=True)


def _read(source: Any, every: bool) -> list[StartupLog]:
    reader, tail, sample, low = _Reader(every), b"", b"", 0
    for block in blocks(source):
        tail += block
        sample = sample or block[:65536]
        high = len(tail) - RIGHT
        if high > LEFT:
            reader.block(tail, low, high)
            tail, low = tail[high - LEFT :], LEFT
    reader.block(tail, low, len(tail))
    reader.close()
    found = any(s.figures or s.runtime or s.errors for s in reader.done)
    if isinstance(source, str | Path) and not found:
        if b"subparser='bench'" in sample:
            raise BadInput(f"{source} is the log of `vllm bench`, not of a server; give what `vllm serve` printed.")
        if not words.RECORD.search(sample.decode("utf-8", "replace")):
            raise BadInput(f"{source} holds no line of a vLLM log; give what `vllm serve` printed while it started.")
    return reader.done
