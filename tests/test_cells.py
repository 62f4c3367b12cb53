"""benchmarks/cells.py: which cells it takes for the book's own work, and what it says of slow ones."""

import sys

import nbformat
import pytest
from conftest import ROOT
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook

sys.path.insert(0, str(ROOT / "benchmarks"))
import cells  # noqa: E402

CHAPTER = [  # source, group
    ('engine = "cpu"', "set-up"),
    ('import qrecipe\nchapter = qrecipe.begin("01_x")', "set-up"),
    ("rows = [1, 2]\nrows", "own"),
    ("def ask(word):\n    return client.post(word)", "own"),
    ('said = ask("hello")', "waiting"),
    ("url = server.base_url", "waiting"),
    ("reply = !curl -s $url", "waiting"),
    ("import torch\nx = torch.zeros(1)", "library"),
    ("def both():\n    return ask(1), ask(2)\n\n\nboth()", "waiting"),
    ("len(rows)", "own"),
]


def executed(folder, seconds):
    """A run folder with this chapter, each cell taking so long."""
    nb = new_notebook(cells=[new_markdown_cell("# x"), *(new_code_cell(source) for source, _ in CHAPTER)])
    for cell, duration in zip(nb.cells[1:], seconds, strict=True):
        cell.metadata["papermill"] = {"duration": duration}
    folder.mkdir()
    nbformat.write(nb, folder / "01_x.ipynb")
    return folder


def test_a_cell_s_group_follows_from_what_it_speaks_of(tmp_path):
    found = cells.cells(executed(tmp_path / "a", [0.1] * len(CHAPTER)) / "01_x.ipynb")
    assert [group for group, *_ in found] == [group for _, group in CHAPTER]


@pytest.mark.parametrize("second, code", [(0.5, 1), (0.2, 0)])
def test_an_own_cell_is_slow_when_it_is_slow_in_every_run(tmp_path, monkeypatch, capsys, second, code):
    folders = [executed(tmp_path / n, [9.0, 9.0, *[s] * (len(CHAPTER) - 2)]) for n, s in (("a", 0.5), ("b", second))]
    monkeypatch.setattr(sys, "argv", ["cells.py", *map(str, folders)])
    assert cells.main() == code
    assert "set-up      9.00 s" in capsys.readouterr().out  # what is no own cell is listed, and not judged


def test_a_folder_without_chapters_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["cells.py", str(tmp_path)])
    with pytest.raises(SystemExit, match="no executed chapter"):
        cells.main()
