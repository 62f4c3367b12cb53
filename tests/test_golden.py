"""The chapters whose output is the same everywhere, held against golden copies cell by cell (pytest-notebook).

After a wanted change: `python tests/test_golden.py` writes the golden copies anew; read the difference before you commit.
"""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import nbformat
import pytest
from papermill.iorw import load_notebook_node
from papermill.parameterize import parameterize_notebook
from pytest_notebook.post_processors import coalesce_streams

ROOT = Path(__file__).resolve().parent.parent
GOLDEN = Path(__file__).with_name("golden")
CHAPTERS = {
    "01_size_gpu": {"engine": "cpu", "whichllm": "recorded"},
    "04_read_memory_profile": {"engine": "cpu", "log": "recorded"},
}
IGNORED = (
    "/metadata", "/nbformat_minor", "/cells/*/metadata", "/cells/*/id", "/cells/*/execution_count",
    "/cells/*/outputs/*/execution_count", "/cells/*/outputs/*/metadata", "/cells/*/outputs/*/data/image/png",
    "/cells/*/outputs/*/data/application/vnd.jupyter.widget-view+json",
)  # fmt: skip


def prepared(name):
    """The chapter with its parameters put in, as papermill does it."""
    nb = parameterize_notebook(load_notebook_node(str(ROOT / "notebooks" / f"{name}.ipynb")), CHAPTERS[name])
    for cell in nb.cells:  # papermill gives its own cell a new id each time, and marks cells with tags
        cell.id = "injected" if "injected-parameters" in cell.metadata.get("tags", []) else cell.id
    return nb


@pytest.fixture
def quiet(monkeypatch, tmp_path):
    """What differs from machine to machine is not shown: device, versions, the run folder's name."""
    monkeypatch.setenv("QRECIPE_QUIET", "1")
    monkeypatch.setenv("QRECIPE_OUT", str(tmp_path))


@pytest.mark.parametrize("name", CHAPTERS)
def test_the_golden_copy_has_the_chapter_s_cells(name):
    golden = nbformat.read(GOLDEN / f"{name}.ipynb", as_version=4)
    assert [(c.id, c.source) for c in golden.cells] == [(c.id, c.source) for c in prepared(name).cells]


@pytest.mark.parametrize("name", CHAPTERS)
def test_outputs_are_those_of_the_golden_copy(name, nb_regression, quiet):
    nb_regression.diff_ignore = IGNORED
    nb_regression.exec_timeout = 300
    nb_regression.diff_color_words = False
    nb_regression.check(str(GOLDEN / f"{name}.ipynb"))


def write_golden():
    """Execute the chapters and keep the copies."""
    with tempfile.TemporaryDirectory() as out:
        env = os.environ | {"QRECIPE_QUIET": "1", "QRECIPE_OUT": out}
        for name in CHAPTERS:
            path = GOLDEN / f"{name}.ipynb"
            nbformat.write(prepared(name), path)
            command = [sys.executable, "-m", "jupyter", "execute", "--inplace", "--timeout=300", str(path)]
            subprocess.run(command, env=env, check=True, cwd=ROOT)
            nb, _ = coalesce_streams(nbformat.read(path, as_version=4), {})  # as the regression fixture does
            nb.metadata.pop("widgets", None)
            for cell in nb.cells:
                cell.metadata.pop("execution", None)
                for output in cell.get("outputs", []):
                    output.get("data", {}).pop("image/png", None)
            nbformat.write(nb, path)


if __name__ == "__main__":
    GOLDEN.mkdir(exist_ok=True)
    write_golden()
