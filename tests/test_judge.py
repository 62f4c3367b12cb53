"""The judge of a run: small notebooks that end in every way there is, under the real papermill."""

import json
import subprocess
import sys
import time

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_notebook

from qrecipe import book
from qrecipe.book import Execution, find_notebooks, judge, sort_parameters
from qrecipe.errors import BadInput

OPEN = 'import qrecipe\nchapter = qrecipe.begin("01_x", engine=engine, port=port)'
CLOSE = 'qrecipe.finish({"answer": (42, "tokens")})'


def write(folder, *cells, name="01_x"):
    nb = new_notebook(cells=[new_code_cell(c) for c in cells])
    nb.cells[0].metadata["tags"] = ["parameters"]
    nb.metadata["kernelspec"] = {"name": "python3", "display_name": "Python 3", "language": "python"}
    folder.mkdir(exist_ok=True)
    path = folder / f"{name}.ipynb"
    nbformat.write(nb, path)
    return path


def execute(tmp_path, *cells, parameters=None, cell_limit=60, left=120):
    notebook = write(tmp_path / "in", 'engine = "cpu"\nport = 8000', *cells)
    out = tmp_path / "out"
    out.mkdir()
    return Execution(notebook, parameters or {}, out, cell_limit).begin(left).verdict()


def test_a_chapter_that_ends_well_passes_with_its_figures(tmp_path):
    verdict = execute(tmp_path, OPEN, CLOSE)
    assert (verdict.status, verdict.reason) == ("passed", "")
    assert verdict.measured == {"answer": {"value": 42, "unit": "tokens"}}
    record = json.loads((tmp_path / "out" / "01_x.json").read_text())
    assert record["engine"] == "cpu" and record["versions"]["vllm"] == "0.27.0+cpu" and record["device"]


def test_a_chapter_that_cannot_run_here_is_skipped_with_its_reason_and_no_later_cell_runs(tmp_path):
    verdict = execute(tmp_path, OPEN, "qrecipe.skip('no room on the GPU')", "1 / 0", CLOSE)
    assert (verdict.status, verdict.reason, verdict.measured) == ("skipped", "no room on the GPU", {})
    record = json.loads((tmp_path / "out" / "01_x.json").read_text())
    assert (record["status"], record["why"]) == ("skipped", "no room on the GPU")


def test_the_skipped_line_alone_does_not_skip(tmp_path):
    verdict = execute(tmp_path, OPEN, "print('qrecipe: 01_x skipped')")
    assert verdict.status == "failed" and "closing line" in verdict.reason


def test_a_record_of_another_chapter_is_none_of_this_one(tmp_path):
    other = "from pathlib import Path; p = Path(PAPERMILL_OUTPUT_PATH).with_suffix('.json')\np.write_text(p.read_text().replace('01_x', '02_y'))"
    assert execute(tmp_path, OPEN, CLOSE, other).reason == "01_x.json is of chapter '02_y'"


def test_what_is_no_number_is_null_in_the_record(tmp_path):
    verdict = execute(
        tmp_path, OPEN, 'import numpy\nqrecipe.finish({"a": float("nan"), "b": numpy.float32("inf"), "c": 1})'
    )
    assert verdict.status == "passed" and [m["value"] for m in verdict.measured.values()] == [None, None, 1]


def test_in_jupyterlab_a_skipped_chapter_stops_there(monkeypatch, tmp_path, capsys):
    from qrecipe import chapter
    from qrecipe.errors import ChapterSkipped

    monkeypatch.setenv("QRECIPE_OUT", str(tmp_path))
    monkeypatch.setattr(chapter, "_current", chapter.Chapter("01_x", "cpu", "", {}, "", {}))
    with pytest.raises(ChapterSkipped, match="no room"):
        chapter.skip("no room")
    assert "qrecipe: 01_x skipped" in capsys.readouterr().out.splitlines()


def test_on_a_gpu_the_chapter_that_needs_all_of_it_goes_last_and_the_server_is_left_before(monkeypatch, tmp_path):
    notebooks = [write(tmp_path / "in", 'engine = "auto"\nweights = "real"', f"# {i} {what}", name=f"0{i}_x")
                 for i, what in [(6, "chapter.server()"), (7, "chapter.server() batch.Offline(script)"), (8, "chapter.server()")]]  # fmt: skip
    seen = []
    monkeypatch.setattr(book, "find_notebooks", lambda names: notebooks)
    monkeypatch.setattr("qrecipe.layers.choose_engine", lambda facts, asked: (asked, "stub"))
    monkeypatch.setattr(book.Chapter, "recipe", lambda self: None)
    monkeypatch.setattr(book.serving, "launch", lambda recipe, log_dir: seen.append("launch") or tmp_path)
    monkeypatch.setattr(book.serving, "leave", lambda folder, wait=0.0: seen.append("leave") if wait else None)
    monkeypatch.setattr(book.Execution, "prepare", lambda self: None)
    monkeypatch.setattr(book.Execution, "begin", lambda self, left: seen.append(self.name))
    monkeypatch.setattr(book.Execution, "verdict", lambda self: book.Verdict(self.name, "skipped"))
    monkeypatch.setattr(book, "write_run", lambda *rest: None)
    for engine, order in [
        ("gpu", ["launch", "06_x", "08_x", "leave", "07_x", "leave"]),
        ("cpu", ["launch", "06_x", "07_x", "08_x", "leave"]),
    ]:
        seen.clear()
        passed, _ = book.run_book([], {"engine": engine}, out=tmp_path / engine)
        assert passed and seen == order


@pytest.mark.parametrize(
    "cells, reason, line",
    [
        ((OPEN, "a = 1\n1 / 0\nb = 2", CLOSE), "ZeroDivisionError: division by zero", "1 / 0"),
        ((OPEN, "import os; os._exit(1)", "a = 1", CLOSE), "not run", "import os; os._exit(1)"),
        ((OPEN, "import sys; sys.exit(0)", CLOSE), "SystemExit", ""),
        ((OPEN, "import os\nos.kill(os.getpid(), 9)", CLOSE), "not run", "import os ..."),
        ((OPEN,), "closing line", ""),
        (("print('qrecipe: 01_x complete')",), "01_x.json was not written", ""),
    ],
    ids=["error", "exit", "sys.exit", "killed", "no finish", "no record"],
)
def test_a_chapter_that_ends_badly_fails_and_says_where(tmp_path, cells, reason, line):
    verdict = execute(tmp_path, *cells)
    assert verdict.status == "failed" and reason in verdict.reason
    assert verdict.line == line or not line


def test_a_cell_over_its_limit_fails(tmp_path):
    verdict = execute(tmp_path, OPEN, "import time; time.sleep(60)", CLOSE, cell_limit=2)
    assert verdict.status == "failed" and "limit of 2 s" in verdict.reason


def test_a_run_over_its_limit_ends_and_keeps_what_was_done(tmp_path):
    began = time.monotonic()
    verdict = execute(tmp_path, OPEN, "print('kept')", "import time; time.sleep(600)", left=12)
    assert verdict.status == "failed" and "whole run" in verdict.reason
    assert time.monotonic() - began < 40
    assert "kept" in (tmp_path / "out" / "01_x.ipynb").read_text()


@pytest.mark.parametrize(
    "parameters, words",
    [
        ({"prot": 8001}, "unknown parameter prot: this chapter has engine, port"),
        ({"port": 80}, "port is 80; a whole number from 1024 to 65535 is expected"),
        ({"engine": "tpu"}, "expected one of auto, cpu, gpu"),
    ],
)
def test_papermill_by_hand_meets_the_chapter_s_own_refusal(tmp_path, parameters, words):
    notebook = write(tmp_path / "in", 'engine = "cpu"\nport = 8000', OPEN, CLOSE)
    words_ = [w for k, v in parameters.items() for w in ("-p", k, str(v))]
    done = subprocess.run(
        [sys.executable, "-m", "papermill", notebook, tmp_path / "01_x.ipynb", *words_], capture_output=True, text=True
    )
    assert done.returncode != 0
    verdict = judge(tmp_path / "01_x.ipynb", tmp_path / "01_x.json", done.returncode)
    assert words in verdict.reason


def test_parameters_are_refused_before_anything_starts(tmp_path):
    one = write(tmp_path / "a", 'engine = "auto"\nport = 8000', OPEN, name="01_one")
    two = write(tmp_path / "b", 'engine = "auto"\nseed = 1\nshare = 0.5', OPEN, name="02_two")
    assert sort_parameters([one, two], {"seed": 3, "share": 1}) == {one: {}, two: {"seed": 3, "share": 1}}
    for given, words in [
        ({"sede": 3}, "unknown parameter sede: the chosen chapters have engine, port, seed, share"),
        ({"seed": "three"}, "expected int"),
        ({"port": 80}, "1024"),
        ({"engine": "tpu"}, "expected one of"),
        ({"base_url": "localhost"}, "expected an address|unknown parameter"),
    ]:
        with pytest.raises(BadInput, match=words):
            sort_parameters([one, two], given)


@pytest.mark.parametrize(
    "name, given, words",
    [
        ("workshop", {"cap": 9000}, "cap is 9000 and max_model_len 8192: the longest answer must be shorter"),
        ("workshop", {"max_model_len": 1024}, "cap is 1024 and max_model_len 1024"),
        ("workshop", {"reset_seat": 31}, "reset_seat is 31 and seats 30: a seat from 1 to seats"),
        ("workshop", {"watch_seconds": -1}, "watch_seconds is -1"),
        ("workshop", {"address": "http://192.0.2.7:8000"}, "expected a host's name or number alone"),
        ("workshop", {"seat_runs": "/nowhere"}, "seat_runs '/nowhere': there is no such folder"),
        ("05", {"prompt_lengths": []}, r"prompt_lengths is \[\]"),
        ("05", {"prompt_lengths": [64, "long"]}, "each of prompt_lengths is 'long'"),
    ],
)
def test_what_a_chapter_cannot_work_with_is_refused_against_its_own_defaults(name, given, words):
    with pytest.raises(BadInput, match=words):
        sort_parameters(find_notebooks([name]), given)


def test_notebooks_are_found_by_number_name_and_path():
    assert [p.stem for p in find_notebooks(["03", "03_serve.ipynb", "notebooks/03_serve.ipynb"])] == ["03_serve"]
    with pytest.raises(BadInput, match="no notebook '99': there are 01_"):
        find_notebooks(["99"])


@pytest.mark.parametrize("content", ["", "{}", "not json", '{"cells": 3}'])
def test_a_damaged_copy_is_a_failed_chapter(tmp_path, content):
    (tmp_path / "01_x.ipynb").write_text(content)
    assert judge(tmp_path / "01_x.ipynb", tmp_path / "01_x.json", 0).status == "failed"


def test_an_output_folder_with_something_in_it_is_refused(tmp_path):
    (tmp_path / "mine.txt").write_text("mine")
    with pytest.raises(BadInput, match="not an empty folder"):
        book.new_run_folder(tmp_path)


def test_two_notebooks_of_one_name_are_refused(tmp_path):
    other = write(tmp_path, OPEN, CLOSE, name="03_serve")
    assert len(find_notebooks(["03", "3", "notebooks/03_serve.ipynb"])) == 1
    with pytest.raises(BadInput, match="two notebooks are called 03_serve"):
        find_notebooks(["03", str(other)])


def test_a_chapter_is_found_by_its_bare_number_and_a_mistyped_one_is_guessed():
    assert [p.stem for p in find_notebooks(["3", "workshop"])] == ["03_serve", "workshop"]
    with pytest.raises(BadInput, match="'workshp': did you mean workshop. there are 01_size_gpu, .* workshop"):
        find_notebooks(["workshp"])


def test_a_whole_number_is_read_as_everywhere_on_the_command_line():
    one = find_notebooks(["01"])
    assert sort_parameters(one, {"context": "32K"}) == {one[0]: {"context": 32768}}
    with pytest.raises(BadInput, match="expected int"):
        sort_parameters(one, {"context": "32Q"})


@pytest.mark.parametrize("how", ["no time left", "the run ends", "the run was killed"])
def test_a_chapter_that_was_prepared_and_never_began_leaves_nothing(tmp_path, how):
    out = tmp_path / "out"
    out.mkdir()
    execution = Execution(write(tmp_path / "in", OPEN, CLOSE), {}, out, 60)
    execution.prepare()
    if how == "no time left":
        assert "reached before it" in execution.begin(0).verdict().reason
    elif how == "the run was killed":  # all that it held is closed
        execution.process.stdin.close()
        assert execution.process.wait(30) == 0
    execution.end()
    assert execution.process.poll() is not None
    assert list(out.iterdir()) == []


def test_the_run_s_server_is_started_for_the_chapters_that_take_it():
    asked = {p.stem: book.needs_server(p) for p in find_notebooks([]) + find_notebooks(["workshop"])}
    without = {"01_size_gpu", "02_install_layers", "09_scale_out", "workshop"}  # the workshop's has flags of its own
    assert {name for name, needed in asked.items() if not needed} == without
