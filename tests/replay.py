"""A small HTTP server that replays recorded answers byte for byte, for tests with the real `openai` client.

It stands in for servers we cannot start here: slow, merging or splitting proxies, servers that die, other vendors'.
"""

from __future__ import annotations

import json
import threading
import time
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

STREAMS = Path(__file__).parent / "data" / "streams"


@dataclass
class Reply:
    """One answer: pieces are (seconds to wait, bytes); `kill` drops the connection after them."""

    pieces: list[tuple[float, bytes]]
    status: int = 200
    headers: dict[str, str] = field(default_factory=lambda: {"Content-Type": "text/event-stream; charset=utf-8"})
    kill: bool = False


def sse(*events: dict | str, gap: float = 0.0) -> list[tuple[float, bytes]]:
    """Pieces with one server-sent event each; a dict becomes JSON."""
    texts = [e if isinstance(e, str) else json.dumps(e, ensure_ascii=False) for e in events]
    return [(gap, f"data: {text}\n\n".encode()) for text in texts]


def chunk(delta: dict | None = None, *, index: int = 0, finish: str | None = None, usage=None, **extra) -> dict:
    """A chat.completion.chunk; without a delta it has no choices (the closing usage)."""
    choices = [] if delta is None else [{"index": index, "delta": delta, "finish_reason": finish, **extra}]
    body = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 1, "model": "m", "choices": choices}
    if usage is not None:
        prompt, completion = usage
        body["usage"] = {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}
    return body


def error(status: int, message: str, **headers: str) -> Reply:
    body = json.dumps({"error": {"message": message, "type": "X", "param": None, "code": status}}).encode()
    return Reply([(0, body)], status, {"Content-Type": "application/json", **headers})


def recorded(name: str, speed: float = 1.0) -> Reply:
    """A stream of tests/data/streams: first line what was asked and of whom, then [seconds, bytes as text] a line."""
    head, *lines = (STREAMS / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()
    pieces, before = [], 0.0
    for t, text in map(json.loads, lines):
        pieces.append(((t - before) / speed, text.encode("utf-8", "surrogateescape")))
        before = t
    return Reply(pieces, kill=json.loads(head).get("killed") == "server")


@contextmanager
def replay(*replies: Reply, models: tuple[str, ...] = ("m",)):
    """Serve the replies in order, one a POST; yields (base_url, list of request bodies seen)."""
    waiting, seen = list(replies), []

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *args):
            pass

        def do_GET(self):
            body = json.dumps({"object": "list", "data": [{"id": m, "object": "model"} for m in models]}).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def do_POST(self):
            raw = self.rfile.read(int(self.headers["Content-Length"]))
            seen.append({"path": self.path, "headers": dict(self.headers), **json.loads(raw)})
            reply = waiting.pop(0)
            self.send_response(reply.status)
            for name, value in reply.headers.items():
                self.send_header(name, value)
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            for wait, data in reply.pieces:
                if wait:
                    time.sleep(wait)
                self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))
                self.wfile.flush()
            if reply.kill:
                self.close_connection = True
                self.connection.close()
                return
            self.wfile.write(b"0\r\n\r\n")

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/v1", seen
    finally:
        server.shutdown()
        server.server_close()
