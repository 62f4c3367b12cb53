"""How well the memory model predicts vLLM's start-up figures: a table over all bundled starts.

Two questions, kept apart. Law: given the logged available KV memory, are tokens, concurrency, block size and vLLM's own
estimated length exact within the printed rounding? Estimate: from card and flags alone, how far off are weights and pool?
Starts marked "fit" were used for fitting and prove nothing; "inferred" names inputs that the log does not show.
Run: python benchmarks/prediction.py   (ends with one JSON line)
"""

import json

from qrecipe.starts import compare_start, starts

LAW = {"KV cache size", "maximum concurrency", "attention block", "blocks", "estimated maximum model length"}


def main() -> None:
    """Print the table and the summary."""
    print(f"{'start':30} {'figure':32} {'predicted':>13} {'logged':>13} {'error':>9}  verdict")
    exact, inexact, weights, pool = 0, [], [], []
    for start in starts():
        inferred = f"; inferred: {', '.join(start.inferred)}" if start.inferred else ""
        for row in compare_start(start):
            law = row.figure in LAW
            told = row.predicted
            if law and row.by_law:
                told = row.logged if row.exact else row.by_law[0]
            quantized = start.quantized and row.figure == "weights"
            error = "" if told is None or quantized else f"{100 * (told - row.logged) / abs(row.logged):+.2f} %"
            verdict = ("exact" if row.exact else "NOT exact") if row.exact is not None else "fit" if start.fit else "estimate"
            if row.exact is not None:
                exact += row.exact
                inexact += [] if row.exact else [f"{start.case}: {row.figure}{inferred}"]
            elif told is not None and not quantized and not start.fit:
                (weights if row.figure == "weights" else pool if row.figure.startswith("available") else []).append((abs(row.error_percent), start.case))
            shown = "-" if told is None or quantized else f"{told:.2f}" if isinstance(told, float) else str(told)
            print(f"{start.case[:30]:30} {row.figure:32} {shown:>13} {row.logged:>13} {error:>9}  {verdict}{inferred}")
    summary = {"starts": len(starts()), "law_exact": exact, "law_not_exact": inexact,
               "weights_worst_percent": max(weights, default=None), "pool_worst_percent": max(pool, default=None)}
    print(json.dumps(summary))


if __name__ == "__main__":
    main()
