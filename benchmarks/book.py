"""What the book costs over bare vLLM: `python benchmarks/book.py [CHAPTER…] [--port N] [--join FILE]`.

Runs the chapters (all but 01 and 02, which ask no server, when none is named) with `qrecipe run`, and notes every request
that reached the server and every process that a chapter started beside it (chapter 7's LLM with the lines it was sent,
chapter 8's `vllm bench serve`). Then the same without the book: `vllm serve` with the same words, the same requests with
the same bodies, each as soon as those that had ended before it have ended again, the same processes fed the same lines.
Whoever comes first reads vLLM from the disk and fills vLLM's caches for the other, so the book runs twice: the first run
is printed as cold and not held against anything, the second is. The ratio of the two wall times is printed, chapter by
chapter and for all, last line JSON; the book's promise is at most 1.35 for all. With `--join` the result is added to FILE,
and the sum of all in it is printed and judged. CPU engine, teaching model.
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
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path

import httpx
import nbformat

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


def run_book(chapters: list[str], folder: Path, port: int) -> tuple[float, float, dict, list[dict], dict[str, float]]:
    """The book's begin and wall time, its server's state, what was noted (requests and children by their begin), chapters by their end."""
    (folder / "recorder").mkdir(parents=True)
    for name in ("sitecustomize.py", "book_recorder.py"):
        (folder / "recorder" / name).write_text(RECORDER)
    env = os.environ | {
        "QRECIPE_STATE": str(folder / "state"), "BOOK_RECORD": str(folder / "record"), "PYTHONPATH": f"{folder / 'recorder'}:{os.environ.get('PYTHONPATH', '')}",
        "QRECIPE_SERVE_EXTRA": "--middleware book_recorder.Requests",
    }  # fmt: skip
    build = "from qrecipe.chapter import teaching_model; teaching_model()"
    subprocess.run([sys.executable, "-c", build], env=env, check=True)
    words = ["run", *chapters, "--engine", "cpu", "--out", str(folder / "run"), "-p", "port", str(port)]
    began = time.monotonic()
    subprocess.run([sys.executable, "-m", "qrecipe.cli", *words], env=env, check=True)
    seconds, clock = time.monotonic() - began, time.time() - time.monotonic()
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
    file = folder / f"state/servers/port-{port}/server.json"
    state = json.loads(file.read_text()) if file.is_file() else {}  # chapters that ask no server start none
    ends = {}
    for file in sorted((folder / "run").glob("[0-9]*.ipynb")):
        ended = nbformat.read(file, as_version=4).metadata.papermill.end_time
        ends[file.stem] = datetime.fromisoformat(ended).timestamp() - clock
    return began, seconds, state, sorted([*requests, *children.values()], key=lambda n: n["began"]), ends


@contextmanager
def bare_server(state: dict, folder: Path, base: str):
    """`vllm serve` as the book started it, ready; nothing where it started none."""
    if not state:
        yield
        return
    argv = [w for w in state["argv"] if w not in ("--middleware", "book_recorder.Requests")]
    with open(folder / "bare.log", "wb") as log:
        env = os.environ | state["recipe"]["env"]
        server = subprocess.Popen(argv, env=env, stdout=log, stderr=log, preexec_fn=die_with_parent)
    try:
        while True:
            with suppress(httpx.HTTPError):
                if httpx.get(base + "/health", timeout=2).status_code == 200:
                    break
            assert server.poll() is None, "the bare server did not start"
            time.sleep(0.1)
        yield
    finally:
        server.send_signal(signal.SIGINT)
        server.wait(60)


def bare(state: dict, noted: list[dict], folder: Path, port: int) -> float:
    """Wall time of the same start, requests and processes without the book; each of `noted` gets its `bare` end, in seconds."""
    base, began = f"http://127.0.0.1:{port}", time.monotonic()
    env = os.environ | (state["recipe"]["env"] if state else {})
    with bare_server(state, folder, base):
        done = [threading.Event() for _ in noted]
        threads = [
            threading.Thread(target=again, args=(i, noted, done, base, env, folder, began)) for i in range(len(noted))
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    return time.monotonic() - began


def again(
    i: int, noted: list[dict], done: list[threading.Event], base: str, env: dict, folder: Path, began: float
) -> None:
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
    me["bare"] = time.monotonic() - began
    done[i].set()


def by_chapter(
    began: float, seconds: float, without: float, noted: list[dict], ends: dict[str, float]
) -> dict[str, list[float]]:
    """Seconds of each chapter, with and without the book: what comes before the first and after the last counts as theirs."""
    out, names = {}, sorted(ends, key=ends.get)
    since, before = 0.0, 0.0
    for name in names:
        mine = [n["bare"] for n in noted if n["began"] < ends[name]]
        end, bare_end = (ends[name] - began, max(mine, default=before)) if name != names[-1] else (seconds, without)
        out[name] = [round(end - since, 1), round(bare_end - before, 1)]
        since, before = end, bare_end
    return out


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("chapters", nargs="*")
    parser.add_argument("--port", type=int, default=8055)
    parser.add_argument("--join", type=Path, help="a file that the results of several runs are added up in")
    told = parser.parse_args()
    chapters = told.chapters or ["03", "04", "05", "06", "07", "08", "09"]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "warm"
        _, cold, *_ = run_book(chapters, Path(name) / "cold", told.port)
        began, book, state, noted, ends = run_book(chapters, folder, told.port)
        without = bare(state, noted, folder, told.port)
    kinds = {k: sum(n["kind"] == k for n in noted) for k in ("request", "child")}
    result = {
        "cold_seconds": round(cold, 1), "book_seconds": round(book, 1), "bare_seconds": round(without, 1), "starts": bool(state) + kinds["child"],
        "requests": kinds["request"], "chapters": by_chapter(began, book, without, noted, ends),
    }  # fmt: skip
    if told.join:
        with open(told.join, "a+") as f:
            f.write(json.dumps(result) + "\n")
            f.seek(0)
            parts = [json.loads(line) for line in f]
        result = {k: round(sum(p[k] for p in parts), 1) for k in result if k != "chapters"}
        result["chapters"] = {name: pair for p in parts for name, pair in p["chapters"].items()}
    for name, (mine, bare_) in result["chapters"].items():
        print(f"{name:24} book {mine:6.1f} s  bare {bare_:6.1f} s")
    ratio = result["book_seconds"] / result["bare_seconds"]
    print(
        f"cold book {result['cold_seconds']:.0f} s; book {result['book_seconds']:.0f} s ÷ bare {result['bare_seconds']:.0f} s = {ratio:.2f} (promised: at most {PROMISED})"
    )
    print(json.dumps(result | {"ratio": round(ratio, 3)}))
    return 0 if ratio <= PROMISED else 1


if __name__ == "__main__":
    sys.exit(main())
