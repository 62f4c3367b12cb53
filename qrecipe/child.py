"""A child process that ends with this one, whatever ends this one, and takes its own offspring with it.

Three things see to that: the kernel kills the child when its parent dies (PDEATHSIG), a guard process ends everything
that carries the child's token when its pipe closes or when the notebook's own parent is gone, and `end` does it in
good order.
"""

import os
import select
import subprocess
import time
import uuid
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import psutil

from .errors import ServerFailed
from .processes import Guard, Pid, die_with_parent, end_all, environment, server_processes
from .serving import diagnosis, tail


class Child:
    """One running child. It is written to by `send` and read line by line with `readline`; its stderr goes to `log`."""

    def __init__(self, argv: Sequence[str], log: Path, env: dict | None = None):
        self.argv, self.log, self.token, self._rest = list(argv), Path(log), uuid.uuid4().hex, b""
        self._guard: Guard | None = Guard(self.token, Pid.users())
        with open(self.log, "ab") as out:
            self.process = subprocess.Popen(
                self.argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=out,
                env=environment(self.token, env or {}), start_new_session=True, preexec_fn=die_with_parent,
            )  # fmt: skip

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
        if found := diagnosis(self.log):
            return f"{found['text']} - {found['cause']}. Mend: {found['mend']}. Log: {self.log}"
        said = tail(self.log, 1) or "it said nothing"
        return f"the process ended (exit code {self.process.poll()}): {said}. Log: {self.log}"

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
        if self._guard:
            self._guard.dismiss()
            self._guard = None
        return left
