"""How long a prediction takes from a cold shell, beside whichllm's own command where it can be had.

Both are started as a user starts them, each in a new process. whichllm is fetched by `uvx` once before it is timed; it
asks a model hub, so without a network it answers with an error, and the table says so: then its time is that of the
error, no more than a lower bound. Pinned typer: whichllm does not start with the newest one. The last line is JSON.

    python benchmarks/size.py [--runs 5]
"""

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path

BIN = Path(sys.executable).parent
OURS = [str(BIN / "qrecipe"), "size", "Qwen3.5-4B", "--gpu", "RTX 4090", "--max-model-len", "32768"]
WHICHLLM = ["--with", "typer<0.16", "whichllm", "plan", "Qwen/Qwen3.5-4B", "--context-length", "32768"]


def timed(command: list[str]) -> tuple[float, int]:
    """(seconds, exit code) of one run."""
    began = time.perf_counter()
    done = subprocess.run(command, capture_output=True, timeout=120)
    return time.perf_counter() - began, done.returncode


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=5)
    runs = parser.parse_args().runs
    commands = {"qrecipe size": OURS}
    if uvx := next((p for p in (str(BIN / "uvx"), shutil.which("uvx")) if p and Path(p).exists()), None):
        commands["whichllm plan"] = [uvx, *WHICHLLM]
    result = {}
    for name, command in commands.items():
        timed(command)  # caches of the disk, and the download
        times, codes = zip(*(timed(command) for _ in range(runs)), strict=True)
        result[name] = {"median_s": round(statistics.median(times), 3), "exit_codes": sorted(set(codes))}
        print(f"{name:14} median {statistics.median(times):6.3f} s of {runs} runs, exit codes {sorted(set(codes))}")
    if len(result) == 2:
        result["ratio"] = round(result["whichllm plan"]["median_s"] / result["qrecipe size"]["median_s"], 1)
        print(f"whichllm takes {result['ratio']} times as long")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
