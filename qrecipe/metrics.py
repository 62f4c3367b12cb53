"""vLLM's own clock: its /metrics page read before and after a request, and the difference held against ours.

The server's histograms count seconds in sums and samples, so that sum / samples of a difference is the mean over what
came in between: one request, if nobody else asked. Names as in vLLM 0.27.0 (v1/metrics/loggers.py). Its inter-token
histogram has one sample per engine step, its TTFT starts when the API server has read the request (before it
tokenises), and both end inside the server: HTTP both ways is ours alone. `round_trip` measures that part by itself.
"""

import os
import statistics
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from .dissection import Dissection
from .errors import RequestFailed
from .request import dissect

_MEANS = {
    "ttft": "time_to_first_token", "itl": "inter_token_latency", "e2e": "e2e_request_latency", "queue": "request_queue_time",
    "prefill": "request_prefill_time", "decode": "request_decode_time",
}  # fmt: skip
_COUNTS = {
    "prompt_tokens": "prompt_tokens_total", "generation_tokens": "generation_tokens_total",
    "prefix_queries": "prefix_cache_queries_total", "prefix_hits": "prefix_cache_hits_total",
    "steps": "inter_token_latency_seconds_count", "requests": "request_success_total",
}  # fmt: skip


@dataclass(frozen=True)
class Snapshot:
    """All samples but the buckets, summed over engines; names without `vllm:`. `config`: what it says of its KV pool."""

    values: dict[str, float]
    config: dict[str, str] = field(default_factory=dict)  # num_gpu_blocks, block_size (tokens) and more

    def __getitem__(self, name: str) -> float:
        return self.values.get(name, 0.0)

    @property
    def finished(self) -> int:
        return int(self["request_success_total"])


@dataclass(frozen=True)
class ServerSide:
    """What the server counted between two snapshots: mean seconds (None without a sample), tokens, cache hits."""

    requests: int
    steps: int  # samples of the inter-token histogram
    ttft: float | None
    itl: float | None
    e2e: float | None
    queue: float | None
    prefill: float | None
    decode: float | None
    prompt_tokens: int
    generation_tokens: int
    prefix_queries: int
    prefix_hits: int
    kv_usage: float  # fraction of the KV pool in use at the second snapshot

    @property
    def hit_rate(self) -> float | None:
        """Share of the prompt tokens found in the prefix cache; None when the cache is off (it is not asked)."""
        return self.prefix_hits / self.prefix_queries if self.prefix_queries else None


class Comparison(NamedTuple):
    """One figure from both sides; `agrees` within 5 % or 3 ms for times, exactly for tokens; None: not to be compared."""

    name: str
    ours: float
    servers: float | None = None
    unit: str = "ms"
    difference: float | None = None
    agrees: bool | None = None


def parse_metrics(text: str) -> Snapshot:
    """Read the Prometheus text format; other processes' samples (python_*, http_*) are left out."""
    from prometheus_client.parser import text_string_to_metric_families

    found = Snapshot({})
    for family in text_string_to_metric_families(text):
        for sample in family.samples if family.name.startswith("vllm:") else ():
            name = sample.name.removeprefix("vllm:")
            if name == "cache_config_info":
                found.config.update(sample.labels)
            elif not name.endswith(("_bucket", "_created", "_info")):
                found.values[name] = found[name] + sample.value
    return found


def read_metrics(base_url: str, *, after: Snapshot | None = None, requests: int = 1, timeout: float = 5.0) -> Snapshot:
    """Fetch /metrics of the server behind `base_url` (…/v1).

    With `after`, waits (two seconds at most) until that many more requests are counted as finished: the server books
    a request a moment after its last chunk. Raises RequestFailed when there is no such page.
    """
    import httpx

    url = base_url.rstrip("/").removesuffix("/v1") + "/metrics"
    deadline = time.perf_counter() + 2.0
    while True:
        try:
            reply = httpx.get(url, timeout=timeout)
        except httpx.HTTPError as error:
            raise RequestFailed(f"nothing answers at {url} ({error}): start the server, or mend base_url.") from error
        if reply.status_code != 200 or "vllm:" not in reply.text:
            why = f"{url} has no vLLM metrics (status {reply.status_code}): is the server a vLLM, without --disable-log-stats?"
            raise RequestFailed(why)
        snapshot = parse_metrics(reply.text)
        if after is None or snapshot.finished >= after.finished + requests or time.perf_counter() > deadline:
            return snapshot
        time.sleep(0.02)


def difference(before: Snapshot, after: Snapshot) -> ServerSide:
    """What lies between two snapshots of one server."""
    if after.finished < before.finished:
        raise RequestFailed("the server's counters went backwards: it was restarted between the two readings.")

    def apart(name: str) -> float:
        return after[name] - before[name]

    means = {
        key: apart(f"{name}_seconds_sum") / count if (count := apart(f"{name}_seconds_count")) > 0 else None
        for key, name in _MEANS.items()
    }
    counts = {key: int(apart(name)) for key, name in _COUNTS.items()}
    return ServerSide(kv_usage=after["kv_cache_usage_perc"], **means, **counts)


def round_trip(client: Any, *, repeat: int = 7, **request: Any) -> float:
    """Seconds that HTTP takes both ways, without the model: the median of `repeat` refusals.

    The same streamed request (what the client's `create` takes) goes to the same address under a model name that nobody
    serves: the server reads and checks it and answers 404. That is the part of a TTFT which only the client's clock sees.
    """
    from openai import NotFoundError

    client, times = client.with_options(max_retries=0), []
    usage = {"include_usage": True, "continuous_usage_stats": True}
    request |= {"model": "qrecipe-no-such-model", "stream": True, "stream_options": usage}
    for _ in range(repeat):
        start = time.perf_counter()
        with suppress(NotFoundError):
            client.chat.completions.create(**request).close()
            raise RequestFailed(
                f"{client.base_url} answers under any model name: HTTP alone cannot be measured with it."
            )
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def compare(ours: Dissection, server: ServerSide, http: float = 0.0) -> list[Comparison]:
    """Our clock beside the server's for one request on an otherwise idle server.

    `http` seconds (from `round_trip`) have a row of their own and are taken off our TTFT and E2E, as the server cannot
    see them. Tokens are held against each other one by one; ITL per engine step where a step made several tokens.
    Raises RequestFailed when the server counted other requests as well.
    """
    if (n := server.requests) != 1:
        raise RequestFailed(
            f"the server finished {n} requests in between, not 1: hold the clock against an idle server."
        )
    gaps = ours.itl if server.steps == len(ours.itl) else ours.steps
    less, rows = " - HTTP" if http else "", []
    if http and ours.ttft and server.ttft:
        raw = _in_ms("TTFT as measured", ours.ttft, server.ttft)._replace(agrees=None)
        rows = [raw, Comparison("HTTP alone", 1000 * http)]
    for name, mine, theirs in (
        ("TTFT" + less, ours.ttft and ours.ttft - http, server.ttft),
        ("ITL, mean", statistics.fmean(gaps) if gaps else None, server.itl),
        ("E2E" + less, ours.e2e and ours.e2e - http, server.e2e),
    ):
        if mine is not None and theirs is not None:
            rows.append(_in_ms(name, mine, theirs))
    for name, count, told in (
        ("prompt tokens", ours.prompt_tokens, server.prompt_tokens),
        ("completion tokens", ours.completion_tokens, server.generation_tokens),
    ):
        if count is not None:
            rows.append(Comparison(name, count, told, "tokens", count - told, count == told))
    return rows


def _in_ms(name: str, ours: float, servers: float) -> Comparison:
    apart = ours - servers
    return Comparison(name, 1000 * ours, 1000 * servers, "ms", 1000 * apart, abs(apart) <= max(0.003, 0.05 * servers))


def hold(client: Any, base_url: str, repeat: int = 5, **request: Any) -> list[Comparison]:
    """`compare` for that one of `repeat` requests, after one that warms up, which waited least for a core.

    `request` is what `dissect` takes, its messages among them; `round_trip` goes before each request with nothing in
    between: reading /metrics there leaves server and client cold, and the request's own HTTP then takes longer
    than the refusals did. A token count that disagrees in any of the requests is shown. The last row tells how long this
    thread and the API server's were ready to run and had no core during the request, where Linux can say.
    """
    runs, threads = [], _threads(base_url)
    for _ in range(repeat + 1):
        before, http, waited = read_metrics(base_url), round_trip(client, **request), _waited(threads)
        ours = dissect(client, **request)
        waited = _waited(threads) - waited
        runs.append((waited, compare(ours, difference(before, read_metrics(base_url, after=before)), http)))
    waited, rows = min(runs[1:], key=lambda run: run[0])
    wrong = {row.name: row for _, rows in runs[1:] for row in rows if row.unit == "tokens" and not row.agrees}
    rows = [wrong.get(row.name, row) for row in rows]
    return [*rows, Comparison("waited for a core", 1000 * waited)] if threads else rows


def _threads(base_url: str) -> list[Path]:
    """schedstat files of this thread and, when the server is on this machine, of its API server's event loop."""
    import psutil

    from .processes import listeners

    ids, where = [os.getpid()], urlsplit(base_url)
    with suppress(psutil.Error, ValueError):
        if where.hostname in ("127.0.0.1", "localhost", "::1"):
            ids += filter(None, listeners(where.port))
    return [file for i in ids if (file := Path(f"/proc/{i}/task/{i}/schedstat")).is_file()]


def _waited(threads: list[Path]) -> float:
    """Seconds that these threads have been ready to run without a core (the second number of schedstat, in ns)."""
    return sum(int(file.read_text().split()[1]) for file in threads) / 1e9
