"""Recorded starts of vLLM, and a prediction held against a log, figure by figure.

`starts()` gives the bundled ones (own H200 starts, published guides, public logs), each with its flags, what its log said,
what had to be inferred, and whether the estimates were fitted on it. `compare` works on any of them or on a reader's own log.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

from qrecipe.memory import GIB, Budget, budget
from qrecipe.shape import ModelShape, attention_only, load_shape

DATA = Path(__file__).parent / "data" / "startups.jsonl"
FIGURES = (("weights_gib", "weights", "GiB"), ("consumed_gib", "consumed (weights + non-torch)", "GiB"), ("activation_gib", "peak activation", "GiB"),
           ("cuda_graph_estimate_gib", "CUDA graphs, estimated", "GiB"), ("cuda_graph_gib", "CUDA graphs, actual", "GiB"), ("available_kv_gib", "available KV cache memory", "GiB"),
           ("attention_block_tokens", "attention block", "tokens"), ("blocks", "blocks", ""), ("kv_cache_tokens", "KV cache size", "tokens"),
           ("max_concurrency", "maximum concurrency", "x"), ("longest", "estimated maximum model length", "tokens"))


@dataclass(frozen=True)
class Start:
    """One recorded start. logged: figures by the names of FIGURES. fit: the estimates were fitted on it."""

    case: str
    shape: ModelShape
    flags: dict[str, Any]
    logged: dict[str, Any]
    source: str
    vllm_version: str
    gpu: str | None = None
    total_gib: float | None = None
    inferred: tuple[str, ...] = ()
    quantized: str | None = None
    fit: bool = False
    date: str | None = None


@dataclass(frozen=True)
class Row:
    """One figure: predicted from card and flags, logged, the same by the law from the logged pool, and what to say of it."""

    figure: str
    unit: str
    predicted: float | None
    logged: float | None
    error_percent: float | None
    by_law: tuple[float, float] | None = field(default=None)
    exact: bool | None = None


@lru_cache(maxsize=1)
def starts() -> list[Start]:
    """All recorded starts that come with the package."""
    found = []
    for line in DATA.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        shape = row["shape"]
        shape = load_shape(shape) if isinstance(shape, str) else attention_only(row.get("model", row["case"]), **shape)
        found.append(Start(row["case"], shape, row["flags"], row["logged"], row["source"], row["vllm_version"], row.get("gpu"), row.get("total_gib"),
                           tuple(row.get("inferred", ())), row.get("quantized"), row["fit"], row.get("date")))
    return found


def compare_start(start: Start) -> list[Row]:
    """`compare` for a recorded start."""
    from qrecipe.cards import find_card

    total = start.total_gib or (find_card(start.gpu).memory_gib if start.gpu == "RTX 4090 D" else None)
    return compare(start.shape, start.logged, gpu_memory_gib=total, vllm_version=start.vllm_version, **start.flags)


def compare(model: Any, logged: Any, **settings: Any) -> list[Row]:
    """Predicted | logged | error for every figure that the log holds.

    logged: a dict with the names of FIGURES, or a StartupLog. settings: those of `budget` (gpu or gpu_memory_gib, flags…).
    """
    shape = load_shape(model)
    if not settings.get("max_model_len") and not shape.max_position:
        settings["max_model_len"] = 4096  # the token line of one group does not depend on it
    plain = budget(shape, **settings)
    get = logged.get if isinstance(logged, dict) else lambda name: getattr(logged, name, None)
    available = get("available_kv_gib")
    law = budget(shape, **{k: v for k, v in settings.items() if k not in ("gpu", "gpu_memory_gib", "calibrate")}, available_kv_gib=available) if available is not None else None
    rows = []
    for name, label, unit in FIGURES:
        seen = get(name)
        if seen is None:
            continue
        told, bounds = _predicted(plain, name), _bounds(law, name, seen) if law else None
        exact = None
        if bounds is not None:
            exact = bounds[0] <= seen <= bounds[1]
        elif name == "attention_block_tokens":
            exact = told == seen
        error = 100 * (told - seen) / abs(seen) if told is not None and seen else None
        rows.append(Row(label, unit, told, seen, error, bounds, exact))
    return rows


def _predicted(b: Budget, name: str) -> float | None:
    if name == "consumed_gib":
        return b.weights_gib + b.non_torch_gib if b.weights_gib is not None and b.non_torch_gib is not None else None
    if name == "longest":
        from qrecipe.answers import longest_of

        return longest_of(b) or None
    return getattr(b, name)


def _bounds(law: Budget, name: str, seen: float) -> tuple[float, float] | None:
    """What the law allows for a figure, given the logged available memory and its rounding to 0.01 GiB."""
    low, high = law.blocks_range
    length, pool = law.max_model_len, law.pool
    if name == "kv_cache_tokens":
        return law.kv_cache_tokens_range
    if name == "blocks":
        return low, high
    if name == "max_concurrency":
        return pool.concurrency(low, length) - 0.00501, pool.concurrency(high, length) + 0.00501
    if name == "longest":
        return tuple(pool.longest((law.available_kv_gib + d) * GIB, length) for d in (-0.005, 0.005))
    return None
