"""The one process that watches a server: it starts `vllm serve`, keeps its state file, and outlives nobody.

Run by `Server.start`, never by hand. In the server's folder lie `server.json` (the state), `owners/` (one file for each
process that uses the server) and, once it is ready, `keep` when it is to stay without any. The server ends when the last
owner is gone and its grace time is over, or on a SIGTERM. Where this process itself is killed, its guard ends the server.
"""

import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from contextlib import suppress
from pathlib import Path

import psutil

from .paths import write_whole
from .processes import Guard, Pid, die_with_parent, end_all, environment, listeners, server_processes

ENDED = ("stopped", "failed", "died")
POLL = 0.25  # seconds between two looks
QUIET = float(os.environ.get("QRECIPE_STALL", 120))  # seconds that a start may neither log nor compute
HELD = float(os.environ.get("QRECIPE_HELD", 20))  # seconds that a process of the server may be held by a SIGSTOP
SAVE_WAIT = 5.0  # seconds that the state of a start may stay unwritten
TERM_WAIT = 8.0  # seconds that a ready server has to end by itself
IDLE = 0.012  # processor seconds a second: less is a process that waits (a ready vLLM uses 0.009)
OPEN = urllib.request.build_opener(urllib.request.ProxyHandler({})).open  # a proxy of the environment is not asked


class Supervisor:
    """Watches one server from its start to its end."""

    def __init__(self, folder: Path):
        self.folder, self.file = folder, folder / "server.json"
        self.state = json.loads(self.file.read_text())
        self.token, self.log = self.state["token"], self.state["log"]
        self.server: subprocess.Popen | None = None
        self.guard: Guard | None = None
        self.stopping, self.grace, self.written = False, 0.0, None
        self.last_owner = self.moved = time.monotonic()
        self.held_since: float | None = None
        self.size, self.used, self.engine, self.seen = 0, 0.0, {}, {}

    def save(self, **changes) -> None:
        """Write the state. Raises OSError when the disk is full: `watch` then tries again at its next look."""
        self.state |= changes
        self.written = None
        write_whole(self.file, json.dumps(self.state, indent=1), mode=0o600)
        self.written = self.stamp()

    def stamp(self) -> tuple | None:
        """What tells the state file from another one, None when there is none."""
        with suppress(FileNotFoundError):
            found = self.file.stat()
            return found.st_ino, found.st_mtime_ns

    def start(self) -> None:
        self.guard = Guard(self.token)
        env = environment(self.token, self.state["recipe"]["env"])
        with open(self.log, "ab", buffering=0) as log:
            self.server = subprocess.Popen(
                self.state["argv"], stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=env,
                start_new_session=True, preexec_fn=die_with_parent,
            )  # fmt: skip
        me = Pid.of(os.getpid())
        self.save(status="starting", pid=self.server.pid, supervisor=[me.pid, me.ticks])

    def watch(self) -> None:
        """Look until the server ended or nobody wants it, then clean up and write how it ended."""
        began, looks, unsaved, told = time.monotonic(), 0, None, False  # told: that it is ready
        while not (verdict := self.verdict(looks)):
            if self.state["status"] == "starting" and self.answers():
                self.state |= {"status": "ready", "ready_seconds": round(time.monotonic() - began, 1)}
                self.written = None
                self.stalled("died")  # so that the parts of its engine are known
            try:  # a full disk, or a state file that somebody has damaged: written again
                if self.written is None or self.stamp() != self.written:
                    self.save()
                unsaved = None
            except OSError as e:
                unsaved = unsaved or time.monotonic()
                if not told and time.monotonic() - unsaved > SAVE_WAIT:
                    return self.end("failed", f"its state cannot be written ({e.strerror})")
            told = told or (self.state["status"] == "ready" and unsaved is None)
            if self.guard.poll() is not None:
                os.close(self.guard.pipe)
                self.guard = Guard(self.token)
            looks += 1
            time.sleep(POLL)
        self.end(*verdict)

    def verdict(self, looks: int) -> tuple[str, str] | None:
        """How the server ended or must end now, as (status, why); None while it goes on."""
        starting = self.state["status"] == "starting"
        code = self.server.poll()
        if code is not None:
            return "failed" if starting else "died", f"the server process ended by itself with exit code {code}"
        if self.stopping:
            return "stopped", "a stop was asked for"
        if not self.wanted():
            return "stopped", "its last owner is gone"
        for process, name in self.engine.items():
            if not process.alive():
                return "died", f"its process {name} ({process.pid}) is gone"
        if looks % (2 if starting or self.seen.keys() - self.engine.keys() else 8) == 0:
            return self.stalled("failed" if starting else "died")
        return None

    def stalled(self, status: str) -> tuple[str, str] | None:
        """A verdict when a process is held by a signal, or when a start neither logs nor computes. Notes the engine's parts."""
        now, processes = time.monotonic(), server_processes(self.token)
        named = {}
        for process in processes:
            with suppress(psutil.Error):
                name, parent = process.name(), process.parent()
                if name.startswith("VLLM::") and not (parent and parent.name() == name):  # not a helper it has forked
                    named[Pid.of(process.pid)] = name
        kept = {p: name for p, name in self.engine.items() if p in named or not p.alive()}
        self.engine = kept | {p: name for p, name in named.items() if p in self.seen}  # not a compiler just forked
        self.seen = named
        held = [p for p in processes if Pid.of(p.pid).stopped()]
        self.held_since = (self.held_since or now) if held else None
        if held and now - self.held_since > HELD:
            return status, f"its process {held[0].pid} was stopped by a signal (SIGSTOP) for {HELD:.0f} s"
        used = 0.0
        for process in processes:
            with suppress(psutil.Error):
                used += sum(process.cpu_times()[:2])
        size = os.path.getsize(self.log) if os.path.exists(self.log) else self.size
        if size != self.size or abs(used - self.used) > IDLE * max(1.0, now - self.moved):
            self.size, self.used, self.moved = size, used, now
        if status == "failed" and now - self.moved > QUIET:
            return status, f"it stalled: no line in its log and no work done for {QUIET:.0f} s while it was starting"
        return None

    def answers(self) -> bool:
        """True once the server's own process tree answers on the port, not somebody else's."""
        host, port = self.state["recipe"]["host"], self.state["recipe"]["port"]
        try:
            with OPEN(f"http://{address(host)}:{port}/health", timeout=2) as reply:
                own = {p.pid for p in server_processes(self.token)}
                return reply.status == 200 and bool(own & listeners(port))
        except (OSError, ValueError, psutil.Error):
            return False

    def wanted(self) -> bool:
        if (self.folder / "keep").exists():
            return True
        alive = living_owners(self.folder)
        if alive:
            self.last_owner = time.monotonic()
            self.grace = max(owner["grace"] for owner in alive)
            return True
        return time.monotonic() - self.last_owner < self.grace

    def end(self, status: str, why: str) -> None:
        with suppress(OSError):
            self.save(status="stopping", before=status)
        if self.state.get("ready_seconds") and self.held_since is None and self.server.poll() is None:
            self.server.terminate()
            with suppress(subprocess.TimeoutExpired):
                self.server.wait(TERM_WAIT)
        left = end_all(self.token)
        self.server.wait()
        (self.folder / "keep").unlink(missing_ok=True)
        with suppress(OSError):
            self.save(status=status, why=why, left=left, exit_code=self.server.returncode)
        self.guard.dismiss()


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
        with suppress(OSError):
            file.unlink(missing_ok=True)
    return alive


def address(host: str) -> str:
    """Where this machine reaches a server that binds `host`."""
    host = {"0.0.0.0": "127.0.0.1", "localhost": "127.0.0.1", "": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"[{host}]" if ":" in host else host


def main() -> None:
    supervisor = Supervisor(Path(sys.argv[1]))
    if supervisor.token != sys.argv[2]:  # came up so late that another start has taken its place
        return
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda *_: setattr(supervisor, "stopping", True))
    try:
        supervisor.start()
    except OSError as e:  # its guard ends what has been started
        sys.exit(f"qrecipe: the server could not be started: {e}")
    supervisor.watch()


if __name__ == "__main__":
    main()
