"""A place of its own for each fault: state, runs, port, and `vllm serve` replaced by the stub, or not."""

import json
import os
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import nbformat
import psutil
import pytest
from conftest import ROOT, free_port, is_free, wait_until
from nbformat.v4 import new_code_cell, new_notebook

from qrecipe.processes import carrying
from qrecipe.serving import read_state

STUB = ROOT / "tests/stub"
ALL = os.environ.get("QRECIPE_FAULTS") == "all"  # also the slow ones and those on the real engine: make faults
slow = pytest.mark.skipif(not ALL, reason="one of many of its kind: make faults")
OWNER = """
import sys
from qrecipe import serving
from qrecipe.recipe import ServeRecipe, recipe_for
print("begun", flush=True)
real, port, model, ask, log_dir = sys.argv[1:]
recipe = recipe_for("cpu", model, port=int(port)) if real == "real" else ServeRecipe("stub", port=int(port))
server = serving.Server.start(recipe, log_dir=log_dir or None)
print("ready", flush=True)
if ask == "ask":
    import httpx
    body = {"model": server.model, "messages": [{"role": "user", "content": "go on"}], "max_tokens": 8192, "ignore_eos": True}
    try:
        httpx.post(server.base_url + "/chat/completions", json=body, timeout=None)
    finally:
        print("answered", flush=True)
sys.stdin.read()
"""
OPEN = 'import qrecipe\nchapter = qrecipe.begin("01_x", engine=engine, model=model, weights=weights, port=port)'
CLOSE = "qrecipe.finish({})"


@pytest.fixture(autouse=True)
def swept(tmp_path):
    """Whatever a failed test has left in its places is ended."""
    yield
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.environ().get("QRECIPE_STATE", "").startswith(str(tmp_path)):
                process.kill()


class Place:
    """State folder, run folder and port of one fault's own; `words` go to the stub."""

    def __init__(self, folder: Path, words: str = "load=0.1", model: str = "", **env):
        self.folder, self.state, self.port, self.model = folder, folder / "state", free_port(), model
        self.env = {k: v for k, v in os.environ.items() if k not in ("JPY_SESSION_NAME", "VLLM_API_KEY")}
        self.env |= {"QRECIPE_STATE": str(self.state), "QRECIPE_RUNS": str(folder / "runs"), "STUB": words} | env
        if not model:
            self.env["PYTHONPATH"] = str(STUB)

    def owner(self, until: str = "ready", ask: bool = False, log_dir: str = "") -> subprocess.Popen:
        """A process that starts (or joins) the server and stays; returns when it has come to the line `until`."""
        words = ["real" if self.model else "stub", str(self.port), self.model, "ask" if ask else "", log_dir]
        process = subprocess.Popen(
            [sys.executable, "-c", OWNER, *words],
            env=self.env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        while until and (line := process.stdout.readline()).strip() != until:
            assert line, process.stderr.read()
        return process

    def cli(self, *words, **kw) -> subprocess.Popen:
        """`qrecipe …` in this place."""
        return subprocess.Popen(
            [sys.executable, "-m", "qrecipe.cli", *map(str, words)],
            env=self.env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **kw,
        )  # fmt: skip

    def run(self, *cells, out="out", wait=True, more=(), name="01_x", open_=OPEN):
        """`qrecipe run` of a notebook of these cells: (exit code, stdout + stderr, run.json or {}); the process with wait=False."""
        if not (self.folder / "model").exists():
            tiny_model(self.folder / "model")
        nb = new_notebook(
            cells=[
                new_code_cell(c)
                for c in (f'engine = "cpu"\nmodel = ""\nweights = "real"\nport = {self.port}', open_, *cells)
            ]
        )
        nb.cells[0].metadata["tags"] = ["parameters"]
        nb.metadata["kernelspec"] = {"name": "python3", "display_name": "Python 3", "language": "python"}
        nbformat.write(nb, self.folder / f"{name}.ipynb")
        words = ["run", self.folder / f"{name}.ipynb", "--engine", "cpu", "--out", self.folder / out]
        process = self.cli(*words, "-p", "port", self.port, "-p", "model", self.folder / "model", *more)
        if not wait:
            return process
        said = "".join(process.communicate(timeout=600))
        file = self.folder / out / "run.json"
        return process.returncode, said, json.loads(file.read_text()) if file.is_file() else {}

    def server(self) -> dict:
        """The server's state, {} before there is one; a damaged file is left to the product."""
        folder = self.state / f"servers/port-{self.port}"
        try:
            json.loads((folder / "server.json").read_text())
        except (OSError, ValueError):
            return {}
        return read_state(folder)

    def part(self, name: str) -> psutil.Process | None:
        """A process of this place: "supervisor", "guard", "api" (the server's own), "core" or "worker"."""
        for p in self.left():
            try:
                line = " ".join(p.cmdline())
                kind = "guard" if "qrecipe.processes" in line else "supervisor" if "qrecipe.supervisor" in line else ""
                kind = kind or {"VLLM::EngineCor": "core", "VLLM::Worker": "worker"}.get(p.name()[:15], "")
                if name == (kind or ("api" if p.pid == self.server().get("pid") else "")):
                    return p
            except psutil.Error:
                continue
        return None

    def left(self) -> list[psutil.Process]:
        """Every process of this place that still runs: its environment names the state folder."""
        return carrying("QRECIPE_STATE", str(self.state))

    def clean(self, seconds: float = 20) -> bool:
        """No process is left and the port is free."""
        return wait_until(lambda: not self.left() and is_free(self.port), seconds)

    def good(self, seconds: float = 20) -> None:
        """Nothing is left, and the next start works and leaves nothing either."""
        assert self.clean(seconds), [(p.pid, p.cmdline()) for p in self.left()]
        self.env |= {"STUB": "load=0.1"}
        end(self.owner())
        assert self.clean(seconds), [(p.pid, p.cmdline()) for p in self.left()]


def end(process: subprocess.Popen, seconds: float = 20) -> str:
    """Close an owner's stdin and wait for its end; what it said on stderr."""
    return process.communicate(timeout=seconds)[1]


def tiny_model(folder: Path) -> None:
    """A folder that passes for a complete model."""
    import numpy
    from safetensors.numpy import save_file

    folder.mkdir(parents=True)
    for name in ("config.json", "tokenizer_config.json", "tokenizer.json"):
        (folder / name).write_text('{"model_type": "stub"}')
    save_file({"w": numpy.zeros(4, numpy.float32)}, folder / "model.safetensors")


def until(condition, seconds: float = 30) -> None:
    """Wait for a stage; a stage that does not come is an error of the test."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "the stage was not reached"
        time.sleep(0.02)
