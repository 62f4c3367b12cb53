"""Where a decode step of one request goes, from a PyTorch profiler trace of vLLM's worker: kernels, and gaps between them.

A step is from one start of the model's captured graph to the next. Its kernels are summed by kind; what no kernel
covers is a gap: launches, and the host's work where the GPU waits for it. The profiler stretches the gaps, not the
kernels: hold the kernels' sum against the ITL measured without it, and against the time in which the weights could be
read at the measured bandwidth. That says what stands between a step and its limit.

    vllm serve … --profiler-config '{"profiler": "torch", "torch_profiler_dir": "/tmp/trace"}'
    curl -X POST …/start_profile ; one request ; curl -X POST …/stop_profile
    python benchmarks/decode_step.py /tmp/trace/….pt.trace.json.gz
"""

import gzip
import json
import re
import statistics
import sys
from pathlib import Path

KINDS = {  # first match wins
    "attention": r"flash|attn|attention",
    "Gated DeltaNet": r"delta|recurrent|fused_sigmoid|conv1d|gdn|fla_|chunk_",
    "matrix × vector": r"gemm|gemv|cutlass|cublas|nvjet|matmul|splitk|_mm_|dot_kernel",
    "norms, gates and copies": r"triton|elementwise|norm|copy|cat|index|fill|memcpy|memset|vectorized",
    "choosing the token": r"argmax|sample|softmax|topk|reduce",
}


def kernels_of(trace: Path) -> list[tuple[float, float, str]]:
    """(start, duration, name) of everything that ran on the GPU, µs, in order."""
    opener = gzip.open if trace.suffix == ".gz" else open
    with opener(trace, "rt", encoding="utf-8") as f:
        events = json.load(f)["traceEvents"]
    kinds = {"kernel", "gpu_memcpy", "gpu_memset"}
    return sorted((e["ts"], e["dur"], e["name"]) for e in events if e.get("cat") in kinds)


def steps_of(kernels: list[tuple[float, float, str]]) -> list[list[tuple[float, float, str]]]:
    """The kernels of each decode step: cut at a kernel that runs once a step, the first step (prefill) left out."""
    names = [name for _, _, name in kernels]
    counts = {name: names.count(name) for name in set(names)}
    once = statistics.mode(n for n in counts.values() if n > 8)  # most kernels of the head run once a step
    marker = next(name for name in names if counts[name] == once)
    starts = [n for n, name in enumerate(names) if name == marker]
    return [kernels[a:b] for a, b in zip(starts[2:], starts[3:], strict=False)]


def account(steps: list[list[tuple[float, float, str]]]) -> dict:
    """Medians over the steps: ms a step, ms by kind, ms of gaps, kernels a step."""
    spans = [(nxt[0][0] - step[0][0]) / 1000 for step, nxt in zip(steps, steps[1:], strict=False)]
    rows: dict[str, list[float]] = {}
    for step in steps[:-1]:
        sums = dict.fromkeys([*KINDS, "other"], 0.0)
        for _, duration, name in step:
            kind = next((k for k, pattern in KINDS.items() if re.search(pattern, name, re.I)), "other")
            sums[kind] += duration / 1000
        for kind, ms in sums.items():
            rows.setdefault(kind, []).append(ms)
    by_kind = {kind: round(statistics.median(ms), 4) for kind, ms in rows.items()}
    step_ms = statistics.median(spans)
    return {
        "steps": len(spans),
        "ms_a_step": round(step_ms, 4),
        "kernels_a_step": round(statistics.median(len(s) for s in steps)),
        "ms_by_kind": by_kind,
        "ms_of_gaps": round(step_ms - sum(by_kind.values()), 4),
    }


def main() -> None:
    kernels = kernels_of(Path(sys.argv[1]))
    steps = steps_of(kernels)
    found = account(steps)
    for _, kind, name, ms in longest(steps):
        print(f"{ms:8.3f} ms  {kind:24} {name[:100]}")
    print(json.dumps(found))


def longest(steps: list[list[tuple[float, float, str]]], count: int = 25) -> list[tuple[int, str, str, float]]:
    """The kernels that take most of a step: (runs a step, kind, name, ms a step)."""
    sums: dict[str, list[float]] = {}
    for step in steps:
        for _, duration, name in step:
            sums.setdefault(name, []).append(duration / 1000)
    rows = [
        (
            round(len(ms) / len(steps)),
            next((k for k, p in KINDS.items() if re.search(p, name, re.I)), "other"),
            name,
            sum(ms) / len(steps),
        )
        for name, ms in sums.items()
    ]
    return sorted(rows, key=lambda row: -row[3])[:count]


if __name__ == "__main__":
    main()
