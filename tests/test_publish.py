"""A published copy names no machine, and says on every page what it ran on."""

import base64
import importlib.metadata as metadata
import json
import socket
from pathlib import Path

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output

from qrecipe.lock import departures, lock_facts
from qrecipe.publish import cleaner, machine_names, publish, stamp

PICTURE = base64.b64encode(bytes(range(256)) * 3).decode()
RUN = {
    "passed": True, "date": "2026-11-30T10:38:25+00:00", "seconds": 9.0, "engine": "gpu", "reason": "NVIDIA H200, driver 580", "device": "NVIDIA H200",
    "versions": {"vllm": "0.27.0"}, "lock": "gpu.txt", "lock_sha256": None, "lock_departures": ["torch 2.11.0 instead of 2.13.0"], "note": "A note.",
    "weights": "dummy", "model": {"name": "m"}, "server": {"ready_seconds": 3, "log": "server-1.log"},
    "chapters": [{"name": "03_serve", "status": "passed", "seconds": 1.0, "cell": "", "reason": "", "line": "", "measured": {}}],
}  # fmt: skip


@pytest.fixture
def run_folder(tmp_path, monkeypatch):
    """A run of one chapter whose outputs name this machine in every way that a run does."""
    monkeypatch.setattr(socket, "gethostname", lambda: "giraffe-7")
    folder = tmp_path / "größe run"
    folder.mkdir()
    told = f"wrote {folder}/x on {socket.gethostname()}, {Path.home()}/.cache, file://{folder}/y"
    outputs = [
        new_output("stream", text=told),
        new_output("display_data", {"image/png": PICTURE, "text/html": f"<p>{folder}</p>"}),
    ]
    cells = [new_markdown_cell("# Title"), new_code_cell("1", outputs=outputs, execution_count=1)]
    nb = new_notebook(cells=cells, metadata={"papermill": {"output_path": str(folder / "03_serve.ipynb")}})
    nbformat.write(nb, folder / "03_serve.ipynb")
    (folder / "run.json").write_text(json.dumps(RUN | {"reason": f"{RUN['reason']} {folder}"}))
    (folder / "server-1.log").write_text(
        f"model='{folder}/model' tcp://{socket.gethostname()}:1 127.0.0.1:8000 \x1b[0m\n"
    )
    (folder / "03_serve.papermill.log").write_text("noise")
    return folder


def test_nothing_of_the_machine_is_left(run_folder, tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    publish(run_folder, out)
    assert sorted(p.name for p in out.iterdir()) == ["03_serve.ipynb", "index.html", "run.json", "server-1.log"]
    text = "".join(p.read_text() for p in out.iterdir())
    for name in (
        str(run_folder),
        json.dumps(str(run_folder))[1:-1],
        str(tmp_path),
        socket.gethostname(),
        str(Path.home()),
    ):
        assert name not in text, name
    assert "model='RUN/model' tcp://HOST:1 127.0.0.1:8000 \x1b[0m" in (out / "server-1.log").read_text()
    outputs = nbformat.read(out / "03_serve.ipynb", 4).cells[2].outputs
    assert outputs[0].text == "wrote RUN/x on HOST, ~/.cache, file://RUN/y"
    assert outputs[1].data["image/png"].strip() == PICTURE


def test_every_page_is_stamped_under_its_title(run_folder, tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    page = publish(run_folder, out).read_text()
    cells = nbformat.read(out / "03_serve.ipynb", 4).cells
    assert [c.cell_type for c in cells] == ["markdown", "markdown", "code"]
    for said in (
        "NVIDIA H200",
        "driver 580",
        "vllm 0.27.0",
        "2026-11-30",
        "torch 2.11.0 instead of 2.13.0",
        "A note.",
        "Dummy weights",
    ):
        assert said in cells[1].source and said in page
    assert "Dummy" not in stamp(RUN | {"weights": "real"})


def test_the_longest_name_wins_and_whole_names_only():
    clean = cleaner({"/a": "A", "/a/b": "B", "box": "HOST"})
    assert clean("/a/b/c /a/bc /ab x/a box boxes inbox /a.") == "B/c A/bc /ab x/a HOST boxes inbox A."


def test_a_picture_in_which_a_short_name_stands_by_chance_stays_as_it_is():
    picture = "iVBORw0KGgo" + "A" * 200 + "/vm/" + "B" * 200
    assert cleaner({"vm": "HOST"})(f'"{picture}=", tcp://vm:80') == f'"{picture}=", tcp://HOST:80'


def test_the_names_of_this_machine_are_known(tmp_path):
    names = machine_names(tmp_path)
    assert names[str(tmp_path)] == "RUN" and names[str(Path.home())] == "~"
    assert "127.0.0.1" not in names and "/" not in names and "localhost" not in names


def test_a_lock_is_named_by_its_hash_only_when_it_is_what_is_installed(tmp_path):
    lock, there = tmp_path / "x.txt", metadata.version("nbformat")
    lock.write_text(
        f"# a lock\nnbformat=={there} \\\n    --hash=sha256:00\n    # via x\nnotthere==1 ; python_version < '3'\n"
    )
    assert departures(lock) == [] and len(lock_facts(lock)["lock_sha256"]) == 64
    lock.write_text("nbformat==0.1 \\\n    --hash=sha256:00\nno-such-package==1 \\\n")
    assert lock_facts(lock) == {
        "lock": "x.txt",
        "lock_sha256": None,
        "lock_departures": [f"nbformat {there} instead of 0.1", "no-such-package is not installed"],
    }
