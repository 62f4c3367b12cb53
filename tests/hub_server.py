"""A small local server that answers like the two model hubs and can drop a connection in the middle of a file."""

import hashlib
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, unquote, urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class Hub:
    """Serves `files` (name → bytes) as the model OWNER/NAME; `drops[name]`: how many answers of that file break off half-way.

    `served[name]` lists the first byte of each answer; `spoil[name]`: how many answers have a byte changed on the way.
    """

    def __init__(self, files: dict[str, bytes], model: str = "Qwen/Tiny"):
        self.files, self.model = files, model
        self.drops: dict[str, int] = {}
        self.served: dict[str, list[int]] = {}
        self.spoil: dict[str, int] = {}
        self.requests: list[str] = []
        hub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *args):
                pass

            def do_HEAD(self):
                self.do_GET()

            def do_GET(self):
                hub.answer(self)

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, args=(0.02,), daemon=True).start()

    def close(self):
        self.server.shutdown()
        self.server.server_close()

    def answer(self, request):
        parts = urlsplit(request.path)
        path, query = unquote(parts.path), {k: v[0] for k, v in parse_qs(parts.query).items()}
        self.requests.append(f"{request.command} {path}")
        api, modelscope = f"/api/models/{self.model}", f"/api/v1/models/{self.model}/repo"
        if path == "/":
            return self.send(request, 200, b"")
        if path in (api, f"{api}/revision/main", f"{api}/revision/{COMMIT}"):
            siblings = [self.entry(name, "rfilename", "sha256") for name in self.files]
            return self.send_json(request, {"_id": "1", "id": self.model, "sha": COMMIT, "siblings": siblings})
        if path == f"{api}/tree/{COMMIT}":
            return self.send_json(request, [{"type": "file", **self.entry(name, "path", "oid")} for name in self.files])
        if path.startswith(f"/{self.model}/resolve/"):
            return self.send_file(request, path.split("/", 5)[-1])
        if path == f"{modelscope}/files":
            entries = [
                {
                    "Path": n,
                    "Name": n,
                    "Type": "blob",
                    "Size": len(b),
                    "Sha256": hashlib.sha256(b).hexdigest(),
                    "Revision": COMMIT,
                }
                for n, b in self.files.items()
            ]
            return self.send_json(request, {"Code": 200, "Success": True, "Data": {"Files": entries}})
        if path == modelscope:
            return self.send_file(request, query["FilePath"])
        code = "RevisionNotFound" if path.startswith(api + "/") else "RepoNotFound"
        self.send(request, 404, b"{}", {"X-Error-Code": code})

    def entry(self, name, key, hash_key):
        """One file as the Hugging Face API lists it: large ones (here: weights) are LFS files."""
        body = self.files[name]
        entry = {key: name, "size": len(body), "oid": hashlib.sha1(b"blob %d\0" % len(body) + body).hexdigest()}
        if name.endswith(".safetensors"):
            entry["lfs"] = {hash_key: hashlib.sha256(body).hexdigest(), "size": len(body), "pointerSize": 134}
        return entry

    def send_json(self, request, value):
        self.send(request, 200, json.dumps(value).encode(), {"Content-Type": "application/json"})

    def send(self, request, status, body, headers=None):
        request.send_response(status)
        for name, value in {"Content-Length": len(body), **(headers or {})}.items():
            request.send_header(name, str(value))
        request.end_headers()
        if request.command != "HEAD":
            request.wfile.write(body)

    def send_file(self, request, name):
        if name not in self.files:
            return self.send(request, 404, b"", {"X-Error-Code": "EntryNotFound"})
        body = self.files[name]
        large = name.endswith(".safetensors")
        tag = (hashlib.sha256 if large else hashlib.sha1)(body).hexdigest()
        start = int((request.headers.get("Range") or "bytes=0-").split("=")[1].split("-")[0])
        headers = {"ETag": f'"{tag}"', "X-Repo-Commit": COMMIT, "Accept-Ranges": "bytes"}
        if start:
            headers["Content-Range"] = f"bytes {start}-{len(body) - 1}/{len(body)}"
        if request.command == "HEAD":
            return self.send(request, 200, body, headers)
        self.served.setdefault(name, []).append(start)
        if self.spoil.get(name, 0) > 0:
            self.spoil[name] -= 1
            body = body[:-1] + bytes([body[-1] ^ 1])
        rest = body[start:]
        request.send_response(206 if start else 200)
        for key, value in {"Content-Length": len(rest), **headers}.items():
            request.send_header(key, str(value))
        request.end_headers()
        if self.drops.get(name, 0) > 0 and len(rest) > 1:
            self.drops[name] -= 1
            request.wfile.write(rest[: len(rest) // 2])
            request.wfile.flush()
            request.close_connection = True
            request.connection.close()
            return None
        request.wfile.write(rest)
        return None
