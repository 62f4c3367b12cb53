"""How fast the log reader goes through a large log, and how much memory it takes.

Theory: the reader looks for a few fixed words with a byte search (0.7 to 2.5 GB/s a word on one core) and reads closely
only where one stands. A long run of requests needs eight words, a start-up some fifty; so a log of requests goes at
100 to 200 MB/s, and memory stays that of the interpreter and one block. Three logs are made: requests (one start, then
access lines and metric lines), metrics (metric lines only) and starts (the same start again and again).

    python benchmarks/log_reader.py [--megabytes 1000]

Goal: 1 GB in under 15 s and 80 MB. The last line is one JSON object.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

CODE = """
import json, resource, sys, time
from qrecipe.startup_log import read_log
began = time.perf_counter()
log = read_log(sys.argv[1])
seconds = time.perf_counter() - began
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
print(json.dumps({"seconds": seconds, "peak_mb": peak, "tokens": log.kv_cache_tokens, "rows": len(log.runtime)}))
"""
ACCESS = b'(APIServer pid=505) INFO:     127.0.0.1:39422 - "POST /v1/chat/completions HTTP/1.1" 200 OK\n'
METRIC = (
    b"(APIServer pid=505) INFO 11-30 08:14:41 [loggers.py:310] Engine 000: Avg prompt throughput: 313.2 tokens/s, Avg generation throughput: "
    b"64.5 tokens/s, Running: 1 reqs, Waiting: 0 reqs, GPU KV cache usage: 0.4%, Prefix cache hit rate: 0.0%\n"
)


def write(path: Path, first: bytes, repeat: bytes, size: int) -> None:
    block = repeat * max(1, (1 << 20) // len(repeat))
    with path.open("wb") as file:
        file.write(first)
        while file.tell() < size:
            file.write(block)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--megabytes", type=int, default=1000)
    size = parser.parse_args().megabytes * 1_000_000
    from qrecipe.log_source import recorded

    start = recorded().read_bytes()
    kinds = {"requests": (start, ACCESS * 20 + METRIC), "metrics": (start, METRIC), "starts": (b"", start)}
    result = {"python": sys.version.split()[0], "bytes": size}
    print(f"{'log':10} {'MB/s':>8} {'s':>8} {'peak MB':>8}")
    with tempfile.TemporaryDirectory() as folder:
        for name, (first, repeat) in kinds.items():
            path = Path(folder) / f"{name}.log"
            write(path, first, repeat, size)
            done = subprocess.run([sys.executable, "-c", CODE, str(path)], capture_output=True, text=True, check=True)
            found = json.loads(done.stdout)
            assert found["tokens"] == 3_464_967, found
            rate = path.stat().st_size / 1e6 / found["seconds"]
            print(f"{name:10} {rate:8.0f} {found['seconds']:8.2f} {found['peak_mb']:8.1f}")
            result[name] = {
                "mb_per_s": round(rate, 1),
                "seconds": round(found["seconds"], 2),
                "peak_mb": round(found["peak_mb"], 1),
            }
            path.unlink()
    print(json.dumps(result))


if __name__ == "__main__":
    main()
