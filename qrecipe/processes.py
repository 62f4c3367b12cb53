"""Processes found by a token in their environment, processes that own them, and the guard that ends the ones after the others.

Run as a program it is that guard: `Guard` starts it.
"""

import ctypes
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from .paths import homeless

TOKEN = "QRECIPE_SERVER_TOKEN"


def server_processes(token: str) -> list[psutil.Process]:
    """Every live process whose environment carries `token`, whoever its parent is now."""
    return carrying(TOKEN, token)


def carrying(variable: str, value: str, also: str = "") -> list[psutil.Process]:
    """Every live process in whose environment `variable` has this value, and in which `also` is set when it is given."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):  # gone meanwhile, or another user's
            env = process.environ()
            if env.get(variable) == value and (also or variable) in env and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def environment(token: str, more: dict[str, str]) -> dict[str, str]:
    """This process's environment with `more`, for a process that `token` finds again, with its offspring."""
    env = {k: v for k, v in os.environ.items() if k != "OPENBLAS_CORETYPE"} | more | homeless()
    env["PATH"] = str(Path(sys.executable).parent) + os.pathsep + env.get("PATH", "")
    return env | {TOKEN: token, "PYTHONUNBUFFERED": "1", "SPT_NOENV": "1"}  # process titles must not wipe the token


def end_all(token: str, seconds: float = 10.0) -> list[int]:
    """SIGKILL every process of `token` until none is left. Returns the ids that outlived `seconds`."""
    deadline = time.monotonic() + seconds
    while left := server_processes(token):
        if time.monotonic() > deadline:
            return [p.pid for p in left]
        for process in left:
            with suppress(psutil.Error):
                process.kill()
        time.sleep(0.05)
    return []


def listeners(port: int) -> set[int | None]:
    """Ids of the processes that listen on `port`, None for one that only its own user can see."""
    connections = psutil.net_connections("tcp")
    return {c.pid for c in connections if c.status == psutil.CONN_LISTEN and c.laddr.port == port}


def listener(port: int) -> str:
    """Who listens on `port`, for a sentence; of another user's process only the fact can be seen."""
    with suppress(psutil.Error):
        for pid in filter(None, listeners(port)):
            return f"process {pid} ({' '.join(psutil.Process(pid).cmdline())[:60]})"
    return "another process"


def die_with_parent(number: int = signal.SIGKILL) -> None:
    """Between fork and exec: the kernel sends this process `number` when its parent dies."""
    ctypes.CDLL(None).prctl(1, number)  # PR_SET_PDEATHSIG


@dataclass(frozen=True)
class Pid:
    """A process that is not mistaken for a later one with the same id: its start is counted in clock ticks since boot."""

    pid: int
    ticks: int

    @classmethod
    def of(cls, pid: int) -> "Pid":
        return cls(pid, _stat(pid)[1])

    @classmethod
    def users(cls) -> "list[Pid]":
        """This process, and in a notebook its parent: a kernel without papermill or Jupyter is of no use to anybody."""
        kernel = "ipykernel" in " ".join(psutil.Process().cmdline())
        return [cls.of(os.getpid()), *([cls.of(os.getppid())] if kernel else [])]

    def alive(self) -> bool:
        """True while that very process runs; a zombie has ended."""
        return _stat(self.pid)[1] == self.ticks != 0

    def stopped(self) -> bool:
        """True while a signal (SIGSTOP) holds it."""
        return _stat(self.pid) == ("T", self.ticks)


def _stat(pid: int) -> tuple[str, int]:
    """State and start of /proc/PID/stat, ("", 0) for a process that is gone or a zombie. A clock jump moves neither."""
    try:
        with open(f"/proc/{pid}/stat") as f:
            after_name = f.read().rpartition(")")[2].split()
    except (OSError, ValueError):
        return "", 0
    return ("", 0) if after_name[0] in "ZX" else (after_name[0], int(after_name[19]))


class Guard(subprocess.Popen):
    """A process that ends everything of `token` when this process is gone without `dismiss`, or when an owner is gone."""

    def __init__(self, token: str, owners: Sequence[Pid] = ()):
        read, self.pipe = os.pipe()
        words = [f"{p.pid}:{p.ticks}" for p in owners]
        super().__init__(
            [sys.executable, "-m", "qrecipe.processes", token, *words],
            stdin=read, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip
        os.close(read)

    def dismiss(self) -> None:
        """It ends and does nothing."""
        with suppress(BrokenPipeError):
            os.write(self.pipe, b"done")
        os.close(self.pipe)
        self.wait(10)


def guard(token: str, owners: list[Pid]) -> None:
    """Wait for a word on stdin; when it closes without one, or when an owner is gone, end everything of this token."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    while all(p.alive() for p in owners):
        if select.select([0], [], [], 0.5)[0]:
            if os.read(0, 16) == b"done":
                return
            break
    end_all(token)


if __name__ == "__main__":
    guard(sys.argv[1], [Pid(*map(int, word.split(":"))) for word in sys.argv[2:]])
