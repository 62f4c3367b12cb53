"""Shared by all tests: the project folder, and who is still there."""

import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from qrecipe.processes import TOKEN, carrying

ROOT = Path(__file__).resolve().parent.parent


def pytest_configure(config):
    config.addinivalue_line("markers", "engine: needs a real vLLM server (minutes)")


def wait_until(condition, seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.2)
    return False


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def is_free(port: int) -> bool:
    with socket.socket() as s:
        s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            s.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


class Engine:
    """A state folder and a port of the test run's own, and the commands run in them."""

    def __init__(self, folder: Path):
        self.folder, self.state, self.port = folder, folder / "state", free_port()
        self.env = os.environ | {"QRECIPE_STATE": str(self.state), "QRECIPE_RUNS": str(folder / "runs")}
        self.env.pop("JPY_SESSION_NAME", None)

    def start(self, *words, **kw) -> subprocess.Popen:
        log = open(self.folder / "output.txt", "ab")  # noqa: SIM115 - the process keeps it
        return subprocess.Popen([sys.executable, "-m", *map(str, words)], env=self.env, stdout=log, stderr=log, **kw)

    def run(self, *words, **kw) -> subprocess.CompletedProcess:
        return subprocess.run(
            [sys.executable, "-m", *map(str, words)], env=self.env, text=True, capture_output=True, **kw
        )

    def processes(self) -> list[psutil.Process]:
        """Those of a server, by their environment, whatever they call themselves."""
        return carrying("QRECIPE_STATE", str(self.state), also=TOKEN)

    def clean(self, seconds: float = 40) -> bool:
        """No process of a server is left and the port is free."""
        return wait_until(lambda: not self.processes() and is_free(self.port), seconds)


@pytest.fixture(scope="session")
def engine(tmp_path_factory) -> Engine:
    engine = Engine(tmp_path_factory.mktemp("engine"))
    yield engine
    for p in engine.processes():
        p.kill()
