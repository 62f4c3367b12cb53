"""`vllm bench serve` run and its JSON read, with what the server's /metrics page said meanwhile."""

import json
import sys
import threading
import time
import urllib.request
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from .child import Child
from .errors import BadInput, RequestFailed, ServerFailed
from .metrics import ServerSide, difference, parse_metrics, read_metrics

VLLM = (sys.executable, "-m", "vllm.entrypoints.cli.main")  # `vllm` whatever PATH says
GAUGES = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
MARK = "Starting main benchmark run"  # printed by `vllm bench serve` after the warm-up


class Sample(NamedTuple):
    """The server and the load generator at one moment of a benchmark (`t` in seconds of the main run)."""

    t: float
    running: int
    waiting: int
    kv_usage: float  # fraction of the pool
    client_cores: float  # processor time that the load generator used since the last sample, in cores


@dataclass(frozen=True)
class Bench:
    """One `vllm bench serve` run: its own JSON, what /metrics said meanwhile, the server's clock over the same requests."""

    data: dict
    samples: tuple[Sample, ...] = ()
    server: ServerSide | None = None

    def ms(self, metric: str, what: str | int) -> float | None:
        """A latency in ms: `metric` is ttft, tpot, itl or e2el, `what` "mean", "median" or a percentile; None if absent."""
        keys = [f"p{what}", "median" if what == 50 else ""] if isinstance(what, int) else [what]
        return next((v for key in keys if (v := self.data.get(f"{key}_{metric}_ms")) is not None), None)

    @property
    def concurrency(self) -> int:
        return self.data["max_concurrency"]

    @property
    def busy(self) -> list[Sample]:
        """The samples in which the server had work."""
        return [s for s in self.samples if s.running + s.waiting]

    def mean(self, name: str) -> float | None:
        """Mean of a sample's field while the server had work, None without samples."""
        return sum(getattr(s, name) for s in self.busy) / len(self.busy) if self.busy else None

    @property
    def little(self) -> float | None:
        """Little's law: requests a second × mean seconds a request = requests in the system."""
        mean = self.ms("e2el", "mean")
        return None if mean is None else self.data["request_throughput"] * mean / 1000


def read_bench(path: str | Path) -> dict:
    """The JSON of one `vllm bench serve --save-result`. BadInput when it is none or when no request succeeded."""
    path = Path(path)
    try:
        data = json.loads(path.read_text())
    except (OSError, ValueError) as problem:
        what = f"cannot be read ({problem.strerror})" if isinstance(problem, OSError) else "is not JSON"
        raise BadInput(f"{path} {what}: name a result of vllm bench serve --save-result") from None
    needed = {"max_concurrency", "completed", "request_throughput", "output_throughput", "duration"}
    if missing := needed - data.keys() if isinstance(data, dict) else {"an object"}:
        raise BadInput(f"{path} is no result of vllm bench serve: {', '.join(sorted(missing))} missing")
    if not data["completed"]:
        first = next((e for e in data.get("errors") or [] if e), "no reason given")
        raise BadInput(f"{path}: no request succeeded ({first.strip().splitlines()[-1][:120]})")
    return data


def run_bench(
    command: Sequence[str], result: Path, base_url: str, *, api_key: str = "EMPTY", timeout: float = 900.0, every: float = 0.25
) -> Bench:  # fmt: skip
    """Run one `vllm bench serve …` (which must save to `result`), look at /metrics meanwhile, read its JSON.

    Raises ServerFailed with the last line of its output when it fails, and BadInput as `read_bench` does.
    """
    result = Path(result)
    env = {"OPENAI_API_KEY": api_key, "VLLM_NO_USAGE_STATS": "1", "TOKENIZERS_PARALLELISM": "false"}
    log, deadline = result.with_suffix(".log"), time.monotonic() + timeout
    before = after = watch = None
    samples: list[Sample] = []
    done = threading.Event()
    _metrics(base_url)  # its imports take half a second, which is not to be lost later
    child = Child([*VLLM, *command[1:]], log, env)
    try:
        with open(log, "a") as out:
            while (line := child.readline(deadline - time.monotonic())) is not None:
                out.write(line + "\n")
                if line.startswith(MARK) and (before := _metrics(base_url)):
                    client = psutil.Process(child.process.pid)
                    watch = threading.Thread(target=_watch, args=(base_url, client, every, done, samples), daemon=True)
                    watch.start()
                if watch and line.startswith("=" * 12):
                    done.set()
                    after = after or _metrics(base_url, before)
        code = child.process.wait(30)
    except TimeoutError:
        raise ServerFailed(f"the benchmark did not end within {timeout:.0f} s; its output: {log}") from None
    finally:
        done.set()
        if watch:
            watch.join(10)
        child.end()
    if code:
        raise ServerFailed(child.why())
    return Bench(read_bench(result), tuple(samples), difference(before, after) if before and after else None)


def cache_config(base_url: str) -> dict[str, str]:
    """What a vLLM says on /metrics of its KV pool: num_gpu_blocks, block_size (tokens) and more; {} for another server."""
    found = _metrics(base_url)
    return found.config if found else {}


def comparable(one: Bench, other: Bench) -> list[str]:
    """What differs in the workload of two benchmarks, so that their figures do not compare; [] when nothing does."""
    keys = ("max_concurrency", "num_prompts", "input_len", "output_len", "model_id", "backend", "request_rate")
    pairs = [(key, other.data.get(key), one.data.get(key)) for key in keys]
    return [f"{key} {theirs} against {mine}" for key, theirs, mine in pairs if str(theirs) != str(mine)]


def recorded(name: str) -> list[Bench]:
    """Benchmarks that came with the book, ordered by concurrency; each carries `device`, `vllm` and `recorded`."""
    from importlib.resources import files

    text = (files("qrecipe") / "data/bench" / f"{name}.jsonl").read_text()
    return sorted((Bench(json.loads(line)) for line in text.splitlines()), key=lambda b: b.concurrency)


def _metrics(base_url: str, after: Any = None) -> Any:
    try:
        return read_metrics(base_url, after=after)
    except RequestFailed:
        return None  # not a vLLM: the client's figures alone


def _gauges(base_url: str) -> list[float]:
    """The three gauges alone, summed over engines: a full reading costs too much to be done while one measures."""
    with urllib.request.urlopen(base_url.rstrip("/").removesuffix("/v1") + "/metrics", timeout=5) as reply:
        lines = reply.read().decode().splitlines()
    wanted = tuple(f"vllm:{name}{{" for name in GAUGES)
    page = parse_metrics("\n".join(line for line in lines if line.startswith(wanted)) + "\n")
    return [page[name] for name in GAUGES]


def _watch(base_url: str, client: psutil.Process, every: float, done: threading.Event, samples: list[Sample]) -> None:
    """Read the gauges of /metrics and the load generator's processor time every `every` seconds until `done`."""
    began = last = time.monotonic()
    spent = sum(client.cpu_times()[:2])
    while not done.wait(every):
        with suppress(OSError, ValueError, psutil.Error):
            (running, waiting, usage), now, used = _gauges(base_url), time.monotonic(), sum(client.cpu_times()[:2])
            samples.append(Sample(now - began, int(running), int(waiting), usage, (used - spent) / (now - last)))
            last, spent = now, used
