"""The facts of one dissected request: its chunks, and the times that follow from them, each with formula and clock.

TTFT, ITL, TPOT, TPS as the field uses them (`vllm bench serve` has the same): n tokens, E2E up to the last token.
"""

from collections import Counter
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple

CLIENT = "client, perf_counter"
SERVER = "server, usage"


class Row(NamedTuple):
    """One measured figure: value in `unit`, the formula it follows, and whose clock or count it is."""

    name: str
    value: float | int
    unit: str
    formula: str
    clock: str


@dataclass(frozen=True, slots=True)
class Chunk:
    """One arrival: `t` seconds after the request was sent off, what kind, its text, how many tokens it brought."""

    t: float
    kind: str  # "role", "reasoning", "content", "tool", "finish", "usage"
    text: str
    tokens: int
    choice: int = 0


@dataclass(frozen=True)
class Dissection:
    """One request taken apart. Times in seconds since the call; None where the server gave too little to say."""

    model: str
    endpoint: str
    chunks: list[Chunk]
    texts: list[str]
    reasonings: list[str | None]
    tool_calls: list[dict[str, str]]
    finish_reasons: list[str | None]
    usage: dict[str, Any] | None
    prompt_tokens: int | None
    completion_tokens: int
    marks: dict[str, float] = field(default_factory=dict)
    counted_by: str = ""
    notes: list[str] = field(default_factory=list)
    complete: bool = True
    request_id: str = ""

    @property
    def text(self) -> str:
        return next(iter(self.texts), "")

    @property
    def reasoning(self) -> str | None:
        return next(iter(self.reasonings), None)

    @property
    def finish_reason(self) -> str | None:
        return next(iter(self.finish_reasons), None)

    @property
    def reasoning_tokens(self) -> int:
        return sum(c.tokens for c in self.chunks if c.kind == "reasoning")

    @property
    def connect(self) -> float | None:
        """Seconds for the TCP connection; 0.0 when an open one was used again, None when not seen."""
        if "sent" not in self.marks:
            return None
        return self.marks.get("connected", 0.0) - self.marks.get("connecting", 0.0)

    @property
    def ttft(self) -> float | None:
        """Time to the first chunk that brought a token (a role-only chunk brings none)."""
        return next((c.t for c in self.chunks if c.tokens), None)

    @property
    def ttft_content(self) -> float | None:
        """Time to the first visible text of the answer, after any reasoning."""
        return next((c.t for c in self.chunks if c.kind == "content" and c.text), None)

    @property
    def e2e(self) -> float | None:
        """Time to the last token or finish reason; the usage that trails behind is not waited for."""
        return next((c.t for c in reversed(self.chunks) if c.tokens or c.kind == "finish"), None)

    def arrivals(self) -> list[list[tuple[float, int]]]:
        """Per choice the (time, tokens) of each moment that brought tokens; parts of one chunk are one moment."""
        seen: dict[int, Counter[float]] = {}
        for c in self.chunks:
            if c.tokens:
                seen.setdefault(c.choice, Counter())[c.t] += c.tokens
        return [list(seen[i].items()) for i in sorted(seen)]

    def gaps(self) -> list[tuple[float, float, bool]]:
        """One (t, seconds, spread) per token after the first arrival.

        A chunk of m tokens that came g seconds after the one before gives m entries of g / m, marked `spread`.
        """
        pairs = [pair for times in self.arrivals() for pair in pairwise(times)]
        return sorted((t, (t - before) / m, m > 1) for (before, _), (t, m) in pairs for _ in range(m))

    @property
    def itl(self) -> list[float]:
        """Inter-token latencies in seconds, one a token (tokens that came with the first one have none)."""
        return [g for _, g, _ in self.gaps()]

    @property
    def steps(self) -> list[float]:
        """Gaps between arrivals, one a chunk: what a server's per-step histogram is to be held against."""
        return [t - before for times in self.arrivals() for (before, _), (t, _) in pairwise(times)]

    @property
    def tpot(self) -> float | None:
        """(E2E - TTFT) / (n - 1), over all choices when there are several."""
        arrivals = self.arrivals()
        n = sum(sum(m for _, m in times) - 1 for times in arrivals)
        return sum(times[-1][0] - times[0][0] for times in arrivals) / n if n > 0 else None

    @property
    def tps(self) -> float | None:
        return self.completion_tokens / self.e2e if self.e2e and self.completion_tokens else None

    @property
    def prefill_tps(self) -> float | None:
        return self.prompt_tokens / self.ttft if self.ttft and self.prompt_tokens else None

    def table(self) -> list[Row]:
        """Every figure that could be had, with formula and clock, in the order of the request's life."""
        count, n = (
            (SERVER, "usage.completion_tokens") if self.usage else (self.counted_by, f"counted: {self.counted_by}")
        )
        itl, tpot, first = self.itl, self.tpot, next((c.t for c in self.chunks), None)
        rows = [
            ("connect", self.connect, "ms", "TCP connection made; 0 = an open one was used again", CLIENT),
            ("accepted", self.marks.get("headers"), "ms", "response headers in: request read, checked", CLIENT),
            ("first chunk", first, "ms", "first chunk, token or not - call", CLIENT),
            ("TTFT", self.ttft, "ms", "first chunk that brought a token - call", CLIENT),
            ("TTFT, content", self.ttft_content, "ms", "first text of the answer itself - call", CLIENT),
            ("E2E", self.e2e, "ms", "last token - call", CLIENT),
            ("ITL, mean", sum(itl) / len(itl) if itl else None, "ms", "mean gap between tokens", CLIENT),
            ("ITL, largest", max(itl, default=None), "ms", "largest gap between tokens", CLIENT),
            ("TPOT", tpot, "ms", "(E2E - TTFT) / (n - 1)", CLIENT),
            ("TPS", self.tps, "tokens/s", "n / E2E", CLIENT),
            ("TPS, decode", 1 / tpot if tpot else None, "tokens/s", "1 / TPOT", CLIENT),
            ("prefill rate", self.prefill_tps, "tokens/s", "prompt tokens / TTFT (a lower bound)", CLIENT),
            ("prompt tokens", self.prompt_tokens, "tokens", "usage.prompt_tokens", count),
            ("completion tokens", self.completion_tokens, "tokens", f"n = {n}", count),
            ("reasoning tokens", self.reasoning_tokens, "tokens", "tokens of reasoning chunks", self.counted_by),
        ]
        return [Row(n, 1000 * v if u == "ms" else v, u, f, c) for n, v, u, f, c in rows if v is not None]

    def as_dict(self) -> dict[str, Any]:
        """JSON-ready: every field, the derived times in seconds, and one list [t, kind, text, tokens] a chunk."""
        names = """model endpoint text reasoning tool_calls finish_reason usage prompt_tokens completion_tokens
            reasoning_tokens connect ttft ttft_content e2e tpot tps prefill_tps itl counted_by notes complete request_id"""
        out = {name: getattr(self, name) for name in names.split()}
        return out | {"chunks": [[c.t, c.kind, c.text, c.tokens] for c in self.chunks]}
