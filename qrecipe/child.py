"""A child process that ends with this one, whatever ends this one, and takes its own offspring with it.

Three things see to that: the kernel kills the child when its parent dies (PDEATHSIG), a guard process ends everything
that carries the child's token when its pipe closes or when the notebook's own parent is gone, and `end` does it in
good order.
"""

import os
import select
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import psutil

from .errors import ServerFailed
from .paths import homeless
from .processes import TOKEN, Pid, die_with_parent, end_all, server_processes


class Child:
    """One running child. It is written to by `send` and read line by line with `readline`; its stderr goes to `log`."""

    def __init__(self, argv: Sequence[str], log: Path, env: dict | None = None):
        self.argv, self.log, self.token, self._rest = list(argv), Path(log), uuid.uuid4().hex, b""
        environment = {k: v for k, v in os.environ.items() if k != "OPENBLAS_CORETYPE"} | (env or {})
        environment |= homeless() | {
            TOKEN: self.token,
            "PYTHONUNBUFFERED": "1",
            "SPT_NOENV": "1",
        }  # process titles must not wipe the token
        environment["PATH"] = str(Path(sys.executable).parent) + os.pathsep + environment.get("PATH", "")
        self._start_guard()
        with open(self.log, "ab") as out:
            self.process = subprocess.Popen(
                self.argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=out, env=environment,
                start_new_session=True, preexec_fn=die_with_parent,
            )  # fmt: skip

    def _start_guard(self) -> None:
        read, self._pipe = os.pipe()
        owners = [Pid.of(os.getpid())]
        if "ipykernel" in " ".join(psutil.Process().cmdline()):
            owners.append(Pid.of(os.getppid()))  # papermill or Jupyter: a kernel without it is of no use to anybody
        words = [f"{p.pid}:{p.ticks}" for p in owners]
        self._guard = subprocess.Popen(
            [sys.executable, "-m", "qrecipe.child", self.token, *words],
            stdin=read, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip
        os.close(read)

    def send(self, line: str) -> None:
        """One line to the child's stdin; ServerFailed when it has ended."""
        try:
            self.process.stdin.write(line.encode() + b"\n")
            self.process.stdin.flush()
        except (BrokenPipeError, ValueError):
            raise ServerFailed(self.why()) from None

    def readline(self, timeout: float, on_wait: Callable[[float], None] | None = None) -> str | None:
        """The next line of the child's stdout without its end; None when it has closed it. `on_wait(seconds)` is
        called about four times a second meanwhile. Raises TimeoutError after `timeout` seconds."""
        began, out = time.monotonic(), self.process.stdout.fileno()
        while b"\n" not in self._rest:
            waited = time.monotonic() - began
            if waited > timeout:
                raise TimeoutError(f"no line within {timeout:.0f} s")
            if on_wait:
                on_wait(waited)
            ended = self.process.poll() is not None  # its offspring may still hold stdout open
            if select.select([out], [], [], 0 if ended else 0.25)[0]:
                data = os.read(out, 65536)
                if not data:
                    return None
                self._rest += data
            elif ended:
                return None
        line, _, self._rest = self._rest.partition(b"\n")
        return line.decode("utf-8", "replace")

    def processes(self) -> list[psutil.Process]:
        """The child and all its offspring that still run."""
        return server_processes(self.token)

    def memory_gib(self) -> float:
        """Memory that these processes hold, shared pages counted once (PSS), in GiB."""
        total = 0
        for p in self.processes():
            with suppress(psutil.Error):
                total += p.memory_full_info().pss
        return total / 2**30

    def why(self) -> str:
        """Why it ended: the cause that its log names, with the mend, else the log's last line."""
        from .startup_log import read_log

        with suppress(Exception):  # an empty log adds nothing
            if failure := read_log(self.log).failure:
                return f"{failure['text']} - {failure['cause']}. Mend: {failure['mend']}. Log: {self.log}"
        lines = self.log.read_text(errors="replace").strip().splitlines() if self.log.is_file() else []
        return f"the process ended (exit code {self.process.poll()}): {lines[-1] if lines else 'it said nothing'}. Log: {self.log}"

    def end(self, patience: float = 0.0) -> list[int]:
        """End the child and its offspring: its stdin is closed, and what is left after `patience` seconds is killed.
        Returns the ids that outlived that (none, as a rule)."""
        with suppress(BrokenPipeError):
            self.process.stdin.close()
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(patience)
        left = end_all(self.token)
        self.process.wait(10)
        self.process.stdout.close()
        if self._pipe is not None:
            with suppress(BrokenPipeError):
                os.write(self._pipe, b"done")
            os.close(self._pipe)
            self._pipe = None
            self._guard.wait(10)
        return left


def guard(token: str, owners: list[Pid]) -> None:
    """Wait for the parent's word on stdin; without one, or when an owner is gone, end everything of this token."""
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
