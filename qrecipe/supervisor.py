"""The one process that watches a server: it starts `vllm serve`, keeps its state file, and outlives nobody.

Run by `Server.start`, never by hand. In the server's folder lie `server.json` (the state), `owners/` (one file for each
process that uses the server) and, when somebody wants an end, `stop`. The server ends when the last owner is gone and
its grace time is over, unless `keep`. A guard process ends the server where this process itself is killed: it holds a
pipe that closes then.
"""

import ctypes
import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import psutil

from .paths import write_whole
from .processes import TOKEN, Pid, end_all, server_processes

PR_SET_PDEATHSIG = 1
ENDED = ("stopped", "failed", "died")
POLL = 0.25  # seconds between two looks
STALL = 900.0  # seconds without a new log line before a start counts as stalled
TERM_WAIT = 8.0  # seconds that a ready server has to end by itself


class Supervisor:
    """Watches one server from its start to its end."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.state = json.loads((folder / "server.json").read_text())
        self.token = self.state["token"]
        self.server: subprocess.Popen | None = None
        self.guard: subprocess.Popen | None = None
        self.pipe: int | None = None
        self.stopping = False
        self.last_owner = time.monotonic()
        self.grace = 0.0

    def save(self, **changes) -> None:
        self.state |= changes
        write_whole(self.folder / "server.json", json.dumps(self.state, indent=1), mode=0o600)

    def start(self) -> None:
        env = {k: v for k, v in os.environ.items() if k != "OPENBLAS_CORETYPE"} | self.state["recipe"]["env"]
        env |= {TOKEN: self.token, "PYTHONUNBUFFERED": "1", "SPT_NOENV": "1"}  # process titles must not wipe the token
        env["PATH"] = str(Path(sys.executable).parent) + os.pathsep + env.get("PATH", "")
        with open(self.state["log"], "ab", buffering=0) as log:
            self.server = subprocess.Popen(
                self.state["argv"],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=env,
                start_new_session=True,
                preexec_fn=_die_with_parent,
            )
        self.start_guard()
        me = Pid.of(os.getpid())
        self.save(status="starting", pid=self.server.pid, supervisor=[me.pid, me.ticks])

    def start_guard(self) -> None:
        read, write = os.pipe()
        self.guard = subprocess.Popen(
            [sys.executable, "-m", "qrecipe.supervisor", "--guard", str(self.folder), self.token],
            stdin=read, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip
        os.close(read)
        if self.pipe is not None:
            os.close(self.pipe)
        self.pipe = write

    def watch(self) -> None:
        """Look until the server ended or nobody wants it, then clean up and write how it ended."""
        began = time.monotonic()
        size, moved = 0, began
        while True:
            code = self.server.poll()
            if code is not None:
                word = "failed" if self.state["status"] == "starting" else "died"
                return self.end(word, f"the server process ended by itself with exit code {code}")
            if self.stopping or (self.folder / "stop").exists():
                return self.end("stopped", "a stop was asked for")
            if not self.wanted():
                return self.end("stopped", "its last owner is gone")
            if self.state["status"] == "starting":
                now = os.path.getsize(self.state["log"]) if os.path.exists(self.state["log"]) else size
                if now != size:
                    size, moved = now, time.monotonic()
                if time.monotonic() - moved > STALL:
                    return self.end("failed", f"no line in its log for {STALL:.0f} s while it was starting")
                if self.answers():
                    self.save(status="ready", ready_seconds=round(time.monotonic() - began, 1))
            if self.guard.poll() is not None:
                self.start_guard()
            time.sleep(POLL)

    def answers(self) -> bool:
        """True once the server's own process tree answers on the port, not somebody else's."""
        host, port = self.state["recipe"]["host"], self.state["recipe"]["port"]
        try:
            with urllib.request.urlopen(f"http://{_loopback(host)}:{port}/health", timeout=2) as reply:
                if reply.status != 200:
                    return False
        except OSError:
            return False
        ours = {p.pid for p in server_processes(self.token)}
        return listener(port) in ours | {None}

    def wanted(self) -> bool:
        if self.state["keep"]:
            return True
        alive = living_owners(self.folder)
        if alive:
            self.last_owner = time.monotonic()
            self.grace = max(owner["grace"] for owner in alive)
            return True
        return time.monotonic() - self.last_owner < self.grace

    def end(self, status: str, why: str) -> None:
        self.save(status="stopping", before=status)
        if self.state.get("ready_seconds") and self.server.poll() is None:
            self.server.terminate()
            try:
                self.server.wait(TERM_WAIT)
            except subprocess.TimeoutExpired:
                pass
        left = end_all(self.token)
        self.server.wait()
        (self.folder / "stop").unlink(missing_ok=True)
        self.save(status=status, why=why, left=left, exit_code=self.server.returncode)
        os.write(self.pipe, b"done")
        os.close(self.pipe)
        self.guard.wait(10)


def living_owners(folder: Path) -> list[dict]:
    """The owners that still run; the files of those that are gone are removed."""
    alive = []
    for file in sorted((folder / "owners").glob("*.json")):
        try:
            owner = json.loads(file.read_text())
            if all(Pid(*pair).alive() for pair in owner["processes"]):
                alive.append(owner)
                continue
        except (OSError, ValueError, KeyError, TypeError):
            pass
        file.unlink(missing_ok=True)
    return alive


def listener(port: int) -> int | None:
    """The process that listens on `port`, None when nobody does or it cannot be seen."""
    try:
        for c in psutil.net_connections("tcp"):
            if c.status == psutil.CONN_LISTEN and c.laddr.port == port:
                return c.pid
    except psutil.Error:
        pass
    return None


def _loopback(host: str) -> str:
    return "127.0.0.1" if host in ("0.0.0.0", "::", "localhost") else host


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def guard(folder: Path, token: str) -> None:
    """Wait for the supervisor's word on the pipe; without one it was killed: end the server and say so."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    if sys.stdin.buffer.read() == b"done":
        return
    left = end_all(token)
    file = folder / "server.json"
    state = json.loads(file.read_text())
    if state["token"] == token and state["status"] not in ENDED:
        write_whole(
            file,
            json.dumps(state | {"status": "died", "why": "its supervisor was killed", "left": left}, indent=1),
            mode=0o600,
        )


def main() -> None:
    if sys.argv[1] == "--guard":
        return guard(Path(sys.argv[2]), sys.argv[3])
    supervisor = Supervisor(Path(sys.argv[1]))
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda *_: setattr(supervisor, "stopping", True))
    try:
        supervisor.start()
    except OSError as e:
        supervisor.save(status="failed", why=f"the server could not be started: {e}", exit_code=None, left=[])
        return
    supervisor.watch()


if __name__ == "__main__":
    main()
