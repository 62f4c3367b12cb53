"""Processes of one server, found by a token in their environment, and processes that own it."""

import ctypes
import os
import signal
import time
from dataclasses import dataclass

import psutil

TOKEN = "QRECIPE_SERVER_TOKEN"


def server_processes(token: str) -> list[psutil.Process]:
    """Every live process whose environment carries `token`, whoever its parent is now."""
    return carrying(TOKEN, token)


def carrying(variable: str, value: str) -> list[psutil.Process]:
    """Every live process in whose environment `variable` has this value."""
    needle = f"{variable}={value}".encode()
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


def listens(processes: list[psutil.Process], port: int) -> bool:
    """True when one of these very processes listens on `port`, and not somebody else."""
    for process in processes:
        try:
            connections = process.net_connections("tcp")
        except psutil.Error:
            continue
        if any(c.status == psutil.CONN_LISTEN and c.laddr.port == port for c in connections):
            return True
    return False


def listener(port: int) -> str:
    """Who listens on `port`, for a sentence; of another user's process only the fact can be seen."""
    try:
        pids = [c.pid for c in psutil.net_connections("tcp") if c.status == psutil.CONN_LISTEN and c.laddr.port == port]
        if pids and pids[0]:
            return f"process {pids[0]} ({' '.join(psutil.Process(pids[0]).cmdline())[:60]})"
    except psutil.Error:
        pass
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
