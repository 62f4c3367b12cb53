"""Processes of one server, found by a token in their environment, and processes that own it."""

import os
import signal
import time
from dataclasses import dataclass

import psutil

TOKEN = "QRECIPE_SERVER_TOKEN"


def server_processes(token: str) -> list[psutil.Process]:
    """Every live process whose environment carries `token`, whoever its parent is now."""
    needle = f"{TOKEN}={token}".encode()
    found = []
    for entry in os.listdir("/proc"):
        if not entry.isdigit():
            continue
        try:
            with open(f"/proc/{entry}/environ", "rb") as f:
                if needle in f.read().split(b"\0"):
                    process = psutil.Process(int(entry))
                    if process.status() != psutil.STATUS_ZOMBIE:
                        found.append(process)
        except (OSError, psutil.Error):
            continue
    return found


def end_all(token: str, seconds: float = 10.0) -> list[int]:
    """SIGKILL every process of `token` until none is left. Returns the ids that outlived `seconds`."""
    deadline = time.monotonic() + seconds
    while left := server_processes(token):
        if time.monotonic() > deadline:
            return [p.pid for p in left]
        for process in left:
            try:
                process.send_signal(signal.SIGKILL)
            except psutil.Error:
                pass
        time.sleep(0.05)
    return []


@dataclass(frozen=True)
class Pid:
    """A process that is not mistaken for a later one with the same id: its start is counted in clock ticks since boot."""

    pid: int
    ticks: int

    @classmethod
    def of(cls, pid: int) -> "Pid":
        return cls(pid, _start_ticks(pid) or 0)

    def alive(self) -> bool:
        """True while that very process runs; a zombie has ended."""
        return _start_ticks(self.pid) == self.ticks != 0


def _start_ticks(pid: int) -> int | None:
    """Field 22 of /proc/PID/stat, None for a process that is gone or a zombie. A clock jump does not move it."""
    try:
        with open(f"/proc/{pid}/stat") as f:
            after_name = f.read().rpartition(")")[2].split()
    except OSError:
        return None
    return None if after_name[0] in "ZX" else int(after_name[19])
