"""How well the memory model predicts vLLM's start-up figures: a table over all bundled starts.

Two questions, kept apart. Law: given the logged available KV memory, are tokens, concurrency, block size and vLLM's own
estimated length exact within the printed rounding? Estimate: from card and flags alone, how far off are weights and pool?
Starts marked "fit" were used for fitting and prove nothing; "inferred" names inputs that the log does not show.
Run: python benchmarks/prediction.py   (ends with one JSON line)
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import qrecipe
from qrecipe.memory import GIB, ROUNDING_GIB, Budget, budget, longest_of
from qrecipe.shape import ModelShape, load_shape

DATA = Path(qrecipe.__file__).parent / "data" / "startups.jsonl"
FIGURES = {  # key in `logged`: what it is
    "weights_gib": "weights",
    "consumed_gib": "consumed (weights + non-torch)",
    "activation_gib": "peak activation",
    "cuda_graph_estimate_gib": "CUDA graphs, estimated",
    "cuda_graph_gib": "CUDA graphs, actual",
    "available_kv_gib": "available KV cache memory",
    "attention_block_tokens": "attention block",
    "blocks": "blocks",
    "kv_cache_tokens": "KV cache size",
    "max_concurrency": "maximum concurrency",
    "longest": "estimated maximum model length",
}


@dataclass(frozen=True)
class Start:
    """One recorded start, a line of the data. logged: by the names of FIGURES. fit: the estimates were fitted on it."""

    case: str
    shape: ModelShape
    flags: dict[str, Any]
    logged: dict[str, Any]
    vllm_version: str
    fit: bool
    inferred: list[str]
    total_gib: float | None
    quantized: str | None


@dataclass(frozen=True)
class Row:
    """One figure: predicted from card and flags, logged, and what the law allows given the logged pool."""

    figure: str
    predicted: float | None
    logged: float
    error_percent: float | None
    by_law: tuple[float, float] | None
    exact: bool | None


@lru_cache(maxsize=1)
def starts() -> list[Start]:
    """All recorded starts: own ones, published guides, public logs."""
    found = []
    for line in DATA.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        if isinstance(row["shape"], str):
            shape = load_shape(row["shape"])
        else:  # only its KV cache is known, not its weights
            layers, heads = ("full",) * row["shape"]["layers"], row["shape"]["kv_heads"]
            shape = ModelShape(row["model"], "unknown", layers, heads, heads, row["shape"]["head_dim"])
        found.append(Start(**{name: row.get(name) for name in Start.__dataclass_fields__} | {"shape": shape}))
    return found


def compare_start(start: Start) -> list[Row]:
    """`compare` for a recorded start."""
    settings = {"vllm_version": start.vllm_version, **start.flags}
    if not settings.get("max_model_len") and not start.shape.max_position:
        settings["max_model_len"] = 4096  # the token line of one group does not depend on it
    return compare(start.shape, start.logged, gpu_memory_gib=start.total_gib, **settings)


def compare(model: Any, logged: Any, *, gpu_memory_gib: float | None, **flags: Any) -> list[Row]:
    """Predicted, logged, error for every figure that a log holds: a dict with the names of FIGURES, or a StartupLog."""
    seen = {n: logged.get(n) if isinstance(logged, dict) else getattr(logged, n, None) for n in FIGURES}
    plain, available = budget(model, gpu_memory_gib=gpu_memory_gib, **flags), seen["available_kv_gib"]
    law = budget(model, available_kv_gib=available, **flags) if available is not None else None
    rows = []
    for name, value in seen.items():
        if value is not None:
            told, bounds = _predicted(plain, name), _bounds(law, name) if law else None
            exact = (
                bounds[0] <= value <= bounds[1]
                if bounds
                else told == value
                if name == "attention_block_tokens"
                else None
            )
            error = 100 * (told - value) / abs(value) if told is not None and value else None
            rows.append(Row(FIGURES[name], told, value, error, bounds, exact))
    return rows


def _predicted(b: Budget, name: str) -> float | None:
    return longest_of(b) or None if name == "longest" else getattr(b, name)


def _bounds(law: Budget, name: str) -> tuple[float, float] | None:
    """What the law allows for a figure, given the logged available memory and its rounding to 0.01 GiB."""
    (low, high), need, gib = law.blocks_range, law.blocks_per_request, law.available_kv_gib
    least, most = (law.pool.longest((gib + d) * GIB, law.max_model_len) for d in (-ROUNDING_GIB, ROUNDING_GIB))
    figures = {
        "blocks": (low, high),
        "kv_cache_tokens": law.kv_cache_tokens_range,
        "max_concurrency": (low / need - 0.00501, high / need + 0.00501),
        "longest": (least, most),
    }
    return figures.get(name)


def main() -> None:
    """Print the table and the summary."""
    print(f"{'start':30} {'figure':32} {'predicted':>13} {'logged':>13} {'error':>9}  verdict")
    exact, inexact, weights, pool = 0, [], [], []
    for start in starts():
        inferred = f"; inferred: {', '.join(start.inferred)}" if start.inferred else ""
        for row in compare_start(start):
            told, quantized = row.predicted, start.quantized and row.figure == "weights"
            if row.by_law:
                told = row.logged if row.exact else row.by_law[0]
            error = "" if told is None or quantized else f"{100 * (told - row.logged) / abs(row.logged):+.2f} %"
            verdict = "fit" if start.fit else "estimate"
            if row.exact is not None:
                verdict = "exact" if row.exact else "NOT exact"
                exact += row.exact
                inexact += [] if row.exact else [f"{start.case}: {row.figure}{inferred}"]
            elif told is not None and not quantized and not start.fit:
                worst = {"weights": weights, "available KV cache memory": pool}.get(row.figure, [])
                worst.append((round(abs(row.error_percent), 2), start.case, not start.inferred))
            shown = "-" if told is None or quantized else f"{told:.2f}" if isinstance(told, float) else str(told)
            print(f"{start.case[:30]:30} {row.figure:32} {shown:>13} {row.logged:>13} {error:>9}  {verdict}{inferred}")
    summary = {"starts": len(starts()), "law_exact": exact, "law_not_exact": inexact}
    for name, each in {"weights": weights, "pool": pool}.items():  # of starts that were not used for the fit
        summary[f"{name}_worst_percent"] = max(each)[:2]
        summary[f"{name}_worst_percent_inputs_known"] = max(e for e in each if e[2])[:2]
    print(json.dumps(summary))


if __name__ == "__main__":
    main()
