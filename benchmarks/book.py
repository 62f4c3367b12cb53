"""What the book costs over what it shows: `python benchmarks/book.py [03 05 …] [--port 8055]`.

Runs the chapters (all when none is named) once with `qrecipe run`, and notes every request that reached the server and
every process that a chapter started beside it (chapter 7's LLM with the lines it was sent, chapter 8's `vllm bench
serve`). Then the same without the book: `vllm serve` with the same words, the same requests with the same bodies, each
as soon as those that had ended before it have ended again, the same processes fed the same lines. The ratio of the two
wall times is printed, last line JSON; the book's promise is at most 1.35. CPU engine, teaching model.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import httpx

from qrecipe.processes import die_with_parent

PROMISED = 1.35
RECORDER = '''
import json, os, sys, time

FILE = os.environ.get("BOOK_RECORD")

def note(**what):
    with open(FILE, "a") as f:
        f.write(json.dumps(what) + "\\n")

class Requests:
    """ASGI middleware of the server: notes each POST under /v1 with its body, begin and end."""
    def __init__(self, app):
        self.app = app
    async def __call__(self, scope, receive, send):
        if scope["type"] != "http" or scope["method"] != "POST" or not scope["path"].startswith("/v1"):
            return await self.app(scope, receive, send)
        began, body = time.monotonic(), b""
        async def heard():
            nonlocal body
            message = await receive()
            body += message.get("body", b"")
            return message
        try:
            await self.app(scope, heard, send)
        finally:
            note(kind="request", path=scope["path"], body=body.decode("utf-8", "replace"), began=began, ended=time.monotonic())

if FILE and "ipykernel" in " ".join(sys.orig_argv):
    from qrecipe import child
    init, send, end = child.Child.__init__, child.Child.send, child.Child.end
    def __init__(self, argv, log, env=None):
        init(self, argv, log, env)
        note(kind="child", token=self.token, argv=self.argv, env=env or {}, began=time.monotonic())
    def noted_send(self, line):
        note(kind="line", token=self.token, line=line)
        send(self, line)
    def noted_end(self, *words, **more):
        note(kind="end", token=self.token, ended=time.monotonic())
        return end(self, *words, **more)
    child.Child.__init__, child.Child.send, child.Child.end = __init__, noted_send, noted_end
'''


def run_book(chapters: list[str], folder: Path, port: int) -> tuple[float, dict, list[dict]]:
    """The book's wall time, its server's state, and what was noted: requests and children by their begin."""
    (folder / "recorder").mkdir()
    for name in ("sitecustomize.py", "book_recorder.py"):
        (folder / "recorder" / name).write_text(RECORDER)
    env = os.environ | {
        "QRECIPE_STATE": str(folder / "state"), "BOOK_RECORD": str(folder / "record"), "PYTHONPATH": str(folder / "recorder"),
        "QRECIPE_SERVE_EXTRA": "--middleware book_recorder.Requests",
    }  # fmt: skip
    words = [
        sys.executable,
        "-m",
        "qrecipe.cli",
        "run",
        *chapters,
        "--engine",
        "cpu",
        "--out",
        str(folder / "run"),
        "-p",
        "port",
        str(port),
    ]
    subprocess.run(
        [sys.executable, "-c", "from qrecipe.chapter import teaching_model; teaching_model()"], env=env, check=True
    )
    began = time.monotonic()
    subprocess.run(words, env=env, check=True)
    seconds = time.monotonic() - began
    noted = [json.loads(line) for line in (folder / "record").read_text().splitlines()]
    children = {n["token"]: n | {"lines": [], "ended": n["began"]} for n in noted if n["kind"] == "child"}
    for n in noted:
        if n["kind"] == "line":
            children[n["token"]]["lines"].append(n["line"])
        elif n["kind"] == "end":
            children[n["token"]]["ended"] = max(children[n["token"]]["ended"], n["ended"])
    benches = [c for c in children.values() if "bench" in c["argv"]]
    requests = [
        n for n in noted if n["kind"] == "request" and not any(b["began"] < n["began"] < b["ended"] for b in benches)
    ]
    state = json.loads((folder / f"state/servers/port-{port}/server.json").read_text())
    return seconds, state, sorted([*requests, *children.values()], key=lambda n: n["began"])


def bare(state: dict, noted: list[dict], folder: Path, port: int) -> float:
    """Wall time of the same start, requests and processes without the book."""
    argv = [w for w in state["argv"] if w not in ("--middleware", "book_recorder.Requests")]
    env = os.environ | state["recipe"]["env"]
    base, began = f"http://127.0.0.1:{port}", time.monotonic()
    with open(folder / "bare.log", "wb") as log:
        server = subprocess.Popen(argv, env=env, stdout=log, stderr=log, preexec_fn=die_with_parent)
    try:
        while True:
            try:
                if httpx.get(base + "/health", timeout=2).status_code == 200:
                    break
            except httpx.HTTPError:
                time.sleep(0.1)
            assert server.poll() is None, "the bare server did not start"
        done = [threading.Event() for _ in noted]
        threads = [threading.Thread(target=again, args=(i, noted, done, base, env, folder)) for i in range(len(noted))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        server.send_signal(signal.SIGINT)
        server.wait(60)
    return time.monotonic() - began


def again(i: int, noted: list[dict], done: list[threading.Event], base: str, env: dict, folder: Path) -> None:
    """One request or process, when all that had ended before it began have ended."""
    me = noted[i]
    for other, event in zip(noted, done, strict=True):
        if other["ended"] < me["began"]:
            event.wait()
    if me["kind"] == "request":
        with httpx.stream(
            "POST", base + me["path"], content=me["body"], headers={"Content-Type": "application/json"}, timeout=None
        ) as reply:
            for _ in reply.iter_raw():
                pass
    else:
        with open(folder / f"bare-{i}.log", "wb") as log:
            child = subprocess.Popen(
                me["argv"], env=env | me["env"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True
            )
            for line in me["lines"]:
                child.stdin.write(line + "\n")
                child.stdin.flush()
                child.stdout.readline()
            child.communicate()
    done[i].set()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("chapters", nargs="*")
    parser.add_argument("--port", type=int, default=8055)
    told = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        book, state, noted = run_book(told.chapters, folder, told.port)
        without = bare(state, noted, folder, told.port)
    kinds = {k: sum(n["kind"] == k for n in noted) for k in ("request", "child")}
    result = {
        "book_seconds": round(book, 1),
        "bare_seconds": round(without, 1),
        "ratio": round(book / without, 3),
        "starts": 1 + kinds["child"],
        "requests": kinds["request"],
    }
    print(f"book {book:.0f} s ÷ bare {without:.0f} s = {book / without:.2f} (promised: at most {PROMISED})")
    print(json.dumps(result))
    return 0 if book / without <= PROMISED else 1


if __name__ == "__main__":
    sys.exit(main())
