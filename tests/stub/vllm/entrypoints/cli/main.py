"""Stands in for `vllm serve` where only the book's own part is at stake: the same process tree, stages and HTTP paths.

On PYTHONPATH before the real package. An API server starts VLLM::EngineCore, which starts VLLM::Worker; neither looks
whether its parent lives, so what is left of them is the book's doing. $STUB holds words: `load=2` and `bind=1` are the
seconds of two stages, `deaf` ignores SIGTERM, `dies` ends with an error while loading, `silent` never binds.
"""

import ctypes
import json
import os
import signal
import socket
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

WORDS = dict((w.split("=") + [""])[:2] for w in os.environ.get("STUB", "").split())
NAME = sys.argv[sys.argv.index("--served-model-name") + 1] if "--served-model-name" in sys.argv else "stub"
KEY = os.environ.get("VLLM_API_KEY")


def say(text: str) -> None:
    os.write(1, f"(APIServer pid={os.getpid()}) INFO 11-30 06:35:54 [stub.py:1] {text}\n".encode())


def part(name: bytes, inner=None) -> int:
    """Fork a process of this name that does nothing for ten minutes."""
    pid = os.fork()
    if pid == 0:
        ctypes.CDLL(None).prctl(15, name, 0, 0, 0)
        if inner:
            inner()
        time.sleep(600)
        os._exit(0)
    return pid


class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        if self.path.startswith("/v1") and KEY and self.headers.get("Authorization") != f"Bearer {KEY}":
            return self.answer({"error": "Unauthorized"}, 401)
        model = {"id": NAME, "object": "model", "owned_by": "vllm", "root": sys.argv[2], "max_model_len": 4096}
        self.answer({"object": "list", "data": [model]} if self.path == "/v1/models" else {})

    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"] or 0))
        say("a request that takes long")
        time.sleep(float(WORDS.get("request", 300)))
        self.answer({})

    def answer(self, body: dict, status: int = 200) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_):
        pass


def main() -> None:
    if "deaf" in WORDS:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    say("version 0.27.0")
    part(b"VLLM::EngineCor", lambda: part(b"VLLM::Worker"))
    time.sleep(float(WORDS.get("load", 0.1)))
    if "dies" in WORDS:
        sys.exit("ValueError: the stub was told to die")
    say("loading weights took 0.1 seconds")
    while "silent" in WORDS:
        time.sleep(60)
    time.sleep(float(WORDS.get("bind", 0.1)))
    ThreadingHTTPServer.allow_reuse_address = True
    host, port = (sys.argv[sys.argv.index(word) + 1] for word in ("--host", "--port"))
    ThreadingHTTPServer.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
    server = ThreadingHTTPServer((host, int(port)), Handler)
    say("Application startup complete.")
    server.serve_forever()


if __name__ == "__main__":
    main()
