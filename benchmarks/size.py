"""How long a prediction takes from a cold shell, beside whichllm's own command, each in a new process as a user starts it.

whichllm gets an environment of its own (it does not start with the newest typer). It asks a model hub about the model; here a
hub of one model on this machine answers it at once, so the network is in neither time. Both answers are checked to be
answers. Where whichllm cannot be installed, qrecipe is timed alone and the table says so. The last line is JSON.

    python benchmarks/size.py [--runs 9]
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

BIN = Path(sys.executable).parent
MODEL = "Qwen/Qwen3.5-4B"
CARD = {
    "id": MODEL,
    "tags": ["transformers", "safetensors"],
    "config": {"architectures": ["Qwen3_5ForConditionalGeneration"], "model_type": "qwen3_5"},
    "safetensors": {"parameters": {"BF16": 4_659_865_088}, "total": 4_659_865_088},
    "siblings": [{"rfilename": "config.json"}],
}


class Hub(BaseHTTPRequestHandler):
    """Answers every question with the one model's card."""

    def do_GET(self) -> None:
        body = json.dumps(CARD).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *words) -> None:
        """Nothing on the screen."""


def timed(command: list, answer: str, env: dict) -> float:
    """Seconds of one run; RuntimeError when it does not hold the answer."""
    began = time.perf_counter()
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=env)
    seconds = time.perf_counter() - began
    if answer not in done.stdout:
        raise RuntimeError(f"{command[0]} gave no answer: {(done.stderr or done.stdout)[-300:]}")
    return seconds


def install(folder: Path) -> Path | None:
    """whichllm's program in an environment of its own; None where it cannot be had."""
    uv = next((p for p in (str(BIN / "uv"), shutil.which("uv")) if p and Path(p).exists()), None)
    steps = ["venv", folder], ["pip", "install", "--python", folder, "whichllm", "typer<0.21"]
    if uv is None or any(subprocess.run([uv, "-q", *map(str, s)]).returncode for s in steps):
        return None
    return folder / "bin" / "whichllm"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=9)
    runs = parser.parse_args().runs
    flags = ["--gpu", "RTX 4090", "--max-model-len", "32768"]
    commands = {"qrecipe size": ([BIN / "qrecipe", "size", MODEL, *flags], "kv_cache_tokens")}
    hub = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=hub.serve_forever, daemon=True).start()
    with tempfile.TemporaryDirectory() as folder:
        if program := install(Path(folder) / "whichllm"):
            commands["whichllm plan"] = [program, "plan", MODEL, "--context-length", "32768"], "VRAM Required"
        else:
            print("whichllm cannot be installed here: qrecipe is timed alone")
        env = os.environ | {"HF_ENDPOINT": f"http://127.0.0.1:{hub.server_port}", "HOME": folder}
        for command in commands.values():
            timed(*command, env)  # what a first run caches
        times = {name: [] for name in commands}
        for _ in range(runs):  # in turns: both see the same machine
            for name, command in commands.items():
                times[name].append(timed(*command, env))
    hub.shutdown()
    load = os.getloadavg()[0]
    result = {"runs": runs, "processors": os.cpu_count(), "load": round(load, 1)}
    for name, each in times.items():
        result[name] = {"median_s": round(statistics.median(each), 3), "best_s": round(min(each), 3)}
        print(f"{name:14} median {result[name]['median_s']:.3f} s, best {min(each):.3f} s of {runs} runs")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
