"""Stands in for `vllm serve` where only the book's own part is at stake: the same process tree and the same HTTP paths.

    python stub_server.py PORT SECONDS_TO_BIND [deaf|dies|silent]

An API server starts an engine core, which starts a worker. "deaf" ignores SIGTERM, "dies" ends with an error before it
binds, "silent" never binds.
"""

import json
import signal
import subprocess
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        body = b""
        if self.path == "/v1/models":
            model = {"id": "stub", "object": "model", "owned_by": "vllm", "root": "stub", "max_model_len": 4096}
            body = json.dumps({"object": "list", "data": [model]}).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


def child(depth: int) -> None:
    if depth:
        subprocess.Popen([sys.executable, __file__, "child", str(depth - 1)])
    time.sleep(600)


def main() -> None:
    if sys.argv[1] == "child":
        return child(int(sys.argv[2]))
    port, delay, manner = int(sys.argv[1]), float(sys.argv[2]), (sys.argv[3:] or [""])[0]
    if manner == "deaf":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    print("(APIServer pid=1) INFO 11-30 06:35:54 [api_utils.py:345] version 0.27.0", flush=True)
    subprocess.Popen([sys.executable, __file__, "child", "1"])
    time.sleep(delay)
    if manner == "dies":
        sys.exit("ValueError: the stub was told to die")
    if manner == "silent":
        time.sleep(600)
    ThreadingHTTPServer(("127.0.0.1", port), Handler).serve_forever()


if __name__ == "__main__":
    main()
