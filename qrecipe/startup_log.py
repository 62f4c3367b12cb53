"""One streaming reader of vLLM start-up logs: the memory profile, the timings, the backends, or the failure.

Reads in blocks with constant memory, whatever the size: a fast byte search finds the anchors of `log_words`, and
only their surroundings are looked at closely. Not covered: binary formats, and logs of other servers.
Units: GiB is 2^30 bytes. A figure that the log does not hold is None, never guessed.
"""

import re
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import IO, Any

from . import log_words as words
from .errors import BadInput
from .log_source import blocks
from .log_values import ENGINE_SETTINGS, PRINTED_DICT, SETTINGS, pairs, ranks_of, tokens_from_blocks

LEFT, RIGHT, KEPT, ROWS = 1024, 16384, 40, 2000  # bytes around an anchor; error lines; metric rows
JSON_KEYS = (
    "vllm_version", "weights_gib", "load_seconds", "consumed_gib", "activation_gib", "cuda_graph_estimate_gib",
    "cuda_graph_gib", "available_kv_gib", "kv_cache_tokens", "max_model_len", "max_concurrency",
    "attention_block_tokens", "init_seconds", "compile_seconds",
)  # fmt: skip
MORE_KEYS = (
    "total_gib", "free_gib", "utilization", "requested_gib", "non_torch_gib", "mamba_padding_pct", "gpu_blocks",
    "max_num_batched_tokens", "weights_read_seconds", "warmup_seconds", "capture_seconds", "mm_warmup_seconds",
    "architecture", "model",
)  # fmt: skip


@dataclass(frozen=True)
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
        if found is None:
            return None
        return {key: getattr(found, key, None) for key in ("text", "stage", "cause", "mend", "known")}

    def as_dict(self) -> dict[str, Any]:
        """The JSON of `qrecipe log`."""
        out = {key: self.figures.get(key) for key in JSON_KEYS}
        out |= {"ranks": self.ranks, "ready": self.ready, "failure": self.failure}
        out |= {key: self.figures.get(key) for key in MORE_KEYS}
        out |= {"backends": self.backends, "flags": self.flags, "config": self.config}
        out |= {
            "stages": [list(s) for s in self.stages],
            "compile_cached": self.compile_cached,
            "runtime": self.runtime,
        }
        return out


class StageWatcher:
    """Follows a start line by line: `feed(line)` gives the name of the stage that the line opens, else None."""

    def __init__(self) -> None:
        self.stage = "import"
        self.eager = False

    def feed(self, line: str | bytes) -> str | None:
        raw = line.encode("utf-8", "replace") if isinstance(line, str) else line
        self.eager = self.eager or any(w in raw for w in words.EAGER_WORDS)
        for word, stage in words.STAGE_WORDS:
            if word in raw and self.enter(stage):
                return stage
        if self.eager and b"Encoder cache will be" in raw and self.enter("profile"):
            return "profile"
        return None

    def enter(self, stage: str) -> bool:
        """True when `stage` lies after the present one; stages never go back."""
        if words.STAGES.index(stage) <= words.STAGES.index(self.stage):
            return False
        self.stage = stage
        return True


class _Start:
    """What has been read of one start so far."""

    def __init__(self) -> None:
        self.values: dict[str, dict[str, list]] = {}  # field -> process label -> values
        self.texts: dict[str, str] = {}
        self.backends: dict[str, str] = {}
        self.flags: dict[str, Any] = {}
        self.config: dict[str, Any] = {}
        self.raw: dict[str, str] = {}
        self.watcher = StageWatcher()
        self.stages: list[tuple[str, float | None]] = []
        self.first_errors: list[str] = []
        self.last_errors: deque[str] = deque(maxlen=KEPT)
        self.origin: float | None = None
        self.engines: set[str] = set()
        self.rows: list[dict] = []
        self.row_count, self.stride = 0, 1
        self.cached: bool | None = None
        self.stopped = self.ready = False

    def add(self, name: str, label: str, number: str) -> None:
        value = float(number.replace(",", ""))
        kept = self.values.setdefault(name, {}).setdefault(label if name in words.RANK_FIELDS else "", [])
        if value not in kept and len(kept) < 1024:
            kept.append(int(value) if name in words.WHOLE else value)

    def seconds(self, raw: bytes) -> float | None:
        found = words.TIME.search(raw)
        if not found:
            return None
        year, month, day, hour, minute, second, part = (int(g) if g else 0 for g in found.groups())
        try:
            at = datetime(year or 2000, month, day, hour, minute, min(second, 59)).timestamp()
        except (ValueError, OverflowError):
            return None
        at += int(found[7]) / 10 ** len(found[7]) if found[7] else 0
        if self.origin is None:
            self.origin = at
        since = at - self.origin
        if since < 0 and not year:
            since += 366 * 86400  # the log crosses New Year and names no year
        return round(since, 3) if 0 <= since < 1e7 else None

    def metric(self, line: str, raw: bytes) -> None:
        row: dict[str, Any] = {"seconds": self.seconds(raw)}
        for name, pattern in words.METRIC_WORDS.items():
            found = pattern.search(line)
            try:
                row[name] = float(found[1]) if found else None
            except ValueError:
                row[name] = None
        self.rows.append(row)
        if len(self.rows) >= ROWS:  # constant memory: every other row goes, evenly
            self.rows, self.stride = self.rows[1::2], self.stride * 2

    def finish(self) -> StartupLog:
        figures: dict[str, Any] = dict(self.texts)
        if named := self.config.get("model") or self.flags.get("model"):
            figures.setdefault("model", named)
        labels = list(dict.fromkeys(k for name in words.RANK_FIELDS for k in self.values.get(name, {})))
        ranks = ranks_of(labels, self.values)
        tightest = min(
            (r for r in ranks if r["available_kv_gib"] is not None), key=lambda r: r["available_kv_gib"], default={}
        )
        for name, by_label in self.values.items():
            every = [v for values in by_label.values() for v in values]
            worst = min(every) if name in words.SMALLEST else max(every)
            mine = tightest.get(name) if name in words.RANK_FIELDS else None
            figures[name] = worst if mine is None else mine
        tokens_from_blocks(figures, self.flags, self.config)
        asked = [self.config.get("max_seq_len"), self.flags.get("max_model_len")]
        if said := [n for n in asked if isinstance(n, int)]:
            figures.setdefault("max_model_len", said[0])
        errors = self.first_errors + [e for e in self.last_errors if e not in self.first_errors]
        if self.ready and not any(re.search(r"EngineDead|fatal|died|OutOfMemory|out of memory", e) for e in errors):
            errors = []
        return StartupLog(
            figures, ranks, self.ready, self.backends, self.flags, self.config, self.stages, self.rows, errors,
            self.raw, self.cached,
        )  # fmt: skip


class _Reader:
    """Takes blocks of bytes, keeps the starts found."""

    def __init__(self, every: bool) -> None:
        self.every = every
        self.done: list[StartupLog] = []
        self.start = _Start()
        self.rules: dict[bytes, list[tuple]] = {}
        for rule in words.RULES + words.TEXTS:
            self.rules.setdefault(rule[0], []).append(rule)
        marks = [w for w, _ in words.STAGE_WORDS] + [*words.ARGS, *words.ERRORS, *words.EAGER_WORDS, *words.STOPPED]
        marks += [words.METRICS, b"Encoder cache will be", b"Directly load", b"saved AOT compiled"]
        self.stage_words = {w for w, _ in words.STAGE_WORDS} | {*words.EAGER_WORDS, b"Encoder cache will be"}
        self.anchors = list(dict.fromkeys([*self.rules, *marks]))
        self.signs = [b" GiB", b"non-default args", b"with config", b"startup complete", b"args: Namespace("]
        self.quick = [words.METRICS, *words.ERRORS[:2]]
        self.read, self.alert = 0, 4

    def block(self, buf: bytes, low: int, high: int) -> None:
        """Handles every anchor that begins in buf[low:high]."""
        if not self.every:
            low = self.skip_old_starts(buf, low, high)
        if any(buf.find(sign, low, high) >= 0 for sign in self.signs):
            self.alert = 2  # a start is in this block and may go on in the next one
        anchors = self.anchors if self.alert > 0 else self.quick  # quick: a long run of requests
        self.alert -= 1
        hits = []
        for anchor in anchors:
            found, at = [], buf.find(anchor, low, high)
            while at >= 0:
                found.append((at, anchor))
                at = buf.find(anchor, at + len(anchor), high)
            if len(found) > 100 and anchor in words.ERRORS:  # a flood: its ends are enough
                found = found[:50] + found[-50:]
            hits += found
        hits.sort()
        for at, anchor in hits:
            self.hit(buf, at, anchor)

    def skip_old_starts(self, buf: bytes, low: int, high: int) -> int:
        """Only the last start is wanted: where the last one of this block begins, if another came before it."""
        begin = buf.rfind(words.ARGS[0], low, high)
        if begin >= 0 and buf.find(b"startup complete", low, begin) >= 0:
            self.start = _Start()
            return max(low, buf.rfind(b"startup complete", low, begin) + 20)
        return low

    def hit(self, buf: bytes, at: int, anchor: bytes) -> None:
        if anchor == words.METRICS:
            self.start.row_count += 1
            if self.start.row_count % self.start.stride:
                return
        begin = buf.rfind(b"\n", max(0, at - LEFT), at) + 1 or max(0, at - LEFT)
        if anchor == words.METRICS:
            end = buf.find(b"\n", at, at + LEFT)
            raw = buf[begin : end if end > 0 else at + LEFT]
            return self.start.metric(words.clean(buf[at : at + 400]), raw)
        if anchor in words.ERRORS:
            return self.error(buf, begin, at)
        if anchor in words.STOPPED:
            self.start.stopped = True
            return
        head = buf[begin:at]
        banner = anchor == b"version" and (b"\xe2\x96\x88" in head or b"API server" in head)
        if anchor in words.ARGS or banner:
            self.maybe_new_start(again=len(self.start.values) > 0 or bool(self.start.first_errors) or self.start.ready)
        elif anchor == b"with config" and b"LLM engine" in head:
            found = words.LABEL.search(head)
            name = re.split(rb"[ ,]", found[1])[0].decode("ascii", "replace") if found else ""
            self.maybe_new_start(again=name in self.start.engines or self.start.ready)
            self.start.engines.add(name)
            line = words.clean(buf[at : at + RIGHT // 2].split(b"\n")[0])
            self.start.config = {k: v for k, v in pairs(SETTINGS, line).items() if k in ENGINE_SETTINGS}
        start = self.start
        if anchor in words.ARGS:
            text = words.clean(buf[at : at + RIGHT // 2].split(b"\n")[0])
            start.flags = pairs(PRINTED_DICT if b"non-default" in anchor else SETTINGS, text)
        elif anchor == b"Directly load" and start.cached is None:
            start.cached = True
        elif anchor == b"saved AOT compiled":
            start.cached = False
        if anchor in self.stage_words or not start.stages:
            self.stage(buf, begin, at, anchor)
        if anchor in self.rules and words.is_near(anchor, buf[max(0, at - 240) : at + 120]):
            before, after = words.clean(buf[max(0, at - 240) : at]), words.clean(buf[at : at + 240])
            for rule in self.rules[anchor]:
                self.apply(rule, before, after, buf, at, begin)

    def stage(self, buf: bytes, begin: int, at: int, anchor: bytes) -> None:
        start = self.start
        line = buf[begin : at + len(anchor) + 4]
        if not start.stages:
            start.stages.append(("import", start.seconds(line)))
        stage = start.watcher.feed(line)
        if stage:
            if not words.TIME.search(line):  # uvicorn's own lines carry no time: the last one before counts
                line = b"\n".join(reversed(buf[max(0, begin - LEFT) : begin].split(b"\n")))
            start.stages.append((stage, start.seconds(line)))
            start.ready = start.ready or stage == "ready"

    def apply(self, rule: tuple, before: str, after: str, buf: bytes, at: int, begin: int) -> None:
        _, names, left, right = rule
        found = right.match(after)
        found_left = left.search(before) if left is not None and found else None
        if not found or (left is not None and not found_left):
            return
        groups = [*(found_left.groups() if found_left else ()), *found.groups()]
        if isinstance(names, str):  # a name, not a figure
            target = self.start.texts if names in ("architecture", "vllm_version", "model") else self.start.backends
            value = next((g for g in groups if g), None)
            if value:
                target.setdefault(names, value)
            return
        label = words.LABEL.search(buf[begin:at])
        label = label[1].decode("utf-8", "replace") if label else ""
        for name, number in zip(names, groups, strict=False):
            if number is not None:
                self.start.add(name, label, number)
        end = buf.find(b"\n", at, at + RIGHT)
        line = words.message(buf[begin : end if end > 0 else at + LEFT].decode("utf-8", "replace"))
        for name in names:
            self.start.raw.setdefault(name, line[:1000])

    def error(self, buf: bytes, begin: int, at: int) -> None:
        end = buf.find(b"\n", at, at + 4096)
        end = end if end >= 0 else min(len(buf), at + 4096)
        if self.start.stopped or words.is_quiet(buf[begin : at + 30].decode("latin-1"), at - begin):
            return
        text = words.message(buf[begin:end].decode("utf-8", "replace"))
        if not text.strip() or text[0] in " \t^" or text.startswith(("Traceback", "INFO")):
            return
        for _ in range(6):  # a wrapped message goes on in lines that are no records of their own
            after = buf.find(b"\n", end + 1, end + 1024)
            line = buf[end + 1 : after if after >= 0 else end + 1].decode("utf-8", "replace")
            if (
                len(text) < 60
                or not line.strip()
                or words.RECORD.search(line)
                or line.lstrip().startswith(("Traceback", "File", "During", "The above", "["))
            ):
                break
            text, end = f"{text.rstrip()} {line.strip()}", after
        start = self.start
        if text in start.first_errors or (start.last_errors and start.last_errors[-1] == text):
            return
        if len(start.first_errors) < KEPT:
            start.first_errors.append(text[:2000])
        else:
            start.last_errors.append(text[:2000])

    def maybe_new_start(self, again: bool) -> None:
        if again:
            self.close()
            self.start = _Start()

    def close(self) -> None:
        log = self.start.finish()
        if self.every or not self.done:
            self.done.append(log)
        else:
            self.done[-1] = log


def read_log(source: str | Path | IO | Iterable[str | bytes]) -> StartupLog:
    """The last start in a log: a path, an open file, or lines. A path that holds no vLLM log raises BadInput."""
    return _read(source, every=False)[-1]


def read_all(source: str | Path | IO | Iterable[str | bytes]) -> list[StartupLog]:
    """Every start in a log, oldest first."""
    return _read(source, every=True)


def _read(source: Any, every: bool) -> list[StartupLog]:
    reader = _Reader(every)
    tail, sample = b"", b""
    for block in blocks(source):
        buf = tail + block
        sample = sample or block[:65536]
        high = len(buf) - RIGHT
        if high > LEFT:
            low = min(len(tail), LEFT) if reader.read else 0
            reader.block(buf, low, high)
            reader.read += 1
            tail = buf[high - LEFT :]
        else:
            tail = buf
    reader.block(tail, min(len(tail), LEFT) if reader.read else 0, len(tail))
    reader.close()
    a_path = isinstance(source, str | Path)
    if a_path and not any(s.figures or s.stages or s.runtime or s.errors for s in reader.done):
        if not words.RECORD.search(sample.decode("utf-8", "replace")):
            raise BadInput(f"{source} holds no line of a vLLM log; give what `vllm serve` printed while it started.")
    return reader.done
