"""Which cells of an executed chapter let the reader wait, though they wait for no server and no model.

papermill notes each cell's duration in the executed copy. The cells of a chapter fall into four groups, by rule:
set-up    the cells up to the one that calls `qrecipe.begin`, with the chapter's imports
waiting   cells that name one of WAITS, or a function of the chapter that does: a server, a request, a process, a clock
library   cells that name one of LIBRARIES: the first of them loads it
own       all others: what they take is the book's own doing, and 300 ms is the bound

Every cell of the other groups over the bound is listed too, so that the rule hides nothing. Not covered: the time
until a widget or a figure is drawn by the browser. A busy machine makes every cell slow: run it on an idle one.

    python benchmarks/cells.py RUN_FOLDER [RUN_FOLDER ...] [--bound 0.3]

Prints a card a chapter and ends with one JSON line; exit code 1 when an own cell is over the bound in every folder.
"""

import argparse
import ast
import json
import statistics
import sys
from pathlib import Path

import nbformat

WAITS = "server client httpx dissect post read_metrics hold sweep restarts subprocess Popen Offline llm perf_counter"
LIBRARIES = "torch transformers tf OpenAI vllm"


def names(node: ast.AST) -> set[str]:
    """Every name and attribute that is spoken of in a piece of code."""
    return {getattr(n, "id", getattr(n, "attr", "")) for n in ast.walk(node)}


def cells(path: Path) -> list[tuple[str, float, str]]:
    """(group, seconds, first line that does something) of each code cell of an executed chapter."""
    waits, found, begun = set(WAITS.split()), [], False
    for cell in nbformat.read(path, as_version=4).cells:
        seconds = cell.metadata.get("papermill", {}).get("duration")
        if cell.cell_type != "code" or seconds is None:
            continue
        try:
            body = ast.parse(cell.source).body
        except SyntaxError:  # a magic: it runs a program
            found.append(("waiting", seconds, cell.source.splitlines()[0]))
            continue
        functions = [n for n in body if isinstance(n, ast.FunctionDef)]
        waits |= {f.name for f in functions if names(f) & waits}
        done = [n for n in body if not isinstance(n, ast.FunctionDef)]
        imports = [n for n in done if isinstance(n, ast.Import | ast.ImportFrom)]
        loaded = {name for n in imports for name in (getattr(n, "module", None), *(a.name for a in n.names))}
        spoken = set().union(*map(names, done)) | loaded
        group = "waiting" if spoken & waits else "library" if spoken & set(LIBRARIES.split()) else "own"
        told = next((n for n in done if n not in imports), None)
        line = ast.unparse(told).splitlines()[0] if told else "imports or functions"
        found.append((group if begun else "set-up", seconds, line[:70]))
        begun |= "qrecipe.begin(" in cell.source
    return found


def main() -> int:
    ask = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ask.add_argument("folders", nargs="+", type=Path)
    ask.add_argument("--bound", type=float, default=0.3)
    given = ask.parse_args()
    paths = sorted({p.name for f in given.folders for p in f.glob("[0-9][0-9]_*.ipynb")})
    if not paths:
        sys.exit(f"no executed chapter in {', '.join(map(str, given.folders))}: expected the folder of a `qrecipe run`")
    told = {}
    for name in paths:
        runs = [cells(f / name) for f in given.folders if (f / name).is_file()]
        best = [
            (g, min(r[n][1] for r in runs), line)
            for n, (g, _, line) in enumerate(runs[0])
            if all(n < len(r) for r in runs)
        ]
        own = [s for g, s, _ in best if g == "own"]
        slow = [one for one in best if one[1] > given.bound]
        middle = statistics.median(own) if own else 0.0
        told[name[:2]] = {
            "own": len(own),
            "median_ms": round(1000 * middle),
            "slow": sum(g == "own" for g, _, _ in slow),
        }
        print(
            f"{Path(name).stem}: {len(own)} own cells, median {1000 * middle:.0f} ms, {told[name[:2]]['slow']} over the bound"
        )
        for group, seconds, line in slow:
            print(f"    {group:8} {seconds:7.2f} s  {line}")
    print(json.dumps({"bound_ms": 1000 * given.bound, "runs": len(given.folders), "chapters": told}))
    return 1 if any(t["slow"] for t in told.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
