"""Faults of a run: notebooks that end badly, runs that are interrupted or run again. The judge is right, partial results stay."""

import json
import os
import pty
import signal
import subprocess
import sys
import time
from operator import attrgetter

import pytest
from conftest import is_free, wait_until
from harness import CLOSE, Place, slow, swept, tiny_model, until  # noqa: F401 - swept is a fixture
from test_ground import fill, small_disk

from qrecipe.supervisor import living_owners

SERVER = "server = chapter.server()"
MORE = [pytest.param(signal.SIGTERM, marks=slow), signal.SIGKILL]
name = attrgetter("name")


def executed(place, out="out") -> str:
    return (place.folder / out / "01_x.ipynb").read_text()


def checked(place, result, reason: str, code: int = 1) -> dict:
    """The run failed for this reason, kept what was printed, and left no process and no port. Returns the chapter's verdict."""
    assert result[0] == code, result[1]
    verdict = result[2]["chapters"][0]
    assert verdict["status"] == "failed" and reason in verdict["reason"], verdict
    assert "kept" in executed(place)
    assert (place.folder / "out/junit.xml").is_file() and (place.folder / "out/index.html").is_file()
    assert place.clean(), [(p.pid, p.cmdline()) for p in place.left()]
    return verdict


ENDS = {
    "an error": ("print('kept')\n1 / 0", "ZeroDivisionError", "1 / 0"),
    "sys.exit": ("print('kept')\nimport sys; sys.exit(0)", "SystemExit", "print('kept') ..."),
    "a dead kernel": ("print('kept')\nimport os; os._exit(0)", "kernel died", "print('kept') ..."),
    "no finish": ("print('kept')", "closing line", ""),
}


@pytest.mark.parametrize("end_", ENDS)
def test_notebook_ends_badly(tmp_path, end_):
    cell, reason, line = ENDS[end_]
    place = Place(tmp_path)
    verdict = checked(place, place.run("print('kept')", SERVER, cell), reason)
    assert verdict["line"] == line
    assert "Application startup complete" in verdict["log_tail"]
    place.good()


@pytest.mark.parametrize("limit", ["--cell-timeout", "--timeout"])
def test_notebook_that_never_ends(tmp_path, limit):
    place = Place(tmp_path)
    seconds = "3" if limit == "--cell-timeout" else "15"
    result = place.run("print('kept')", SERVER, "while True:\n    pass", CLOSE, more=(limit, seconds))
    checked(place, result, "limit")
    place.good()


@pytest.mark.parametrize("megabytes", [20, pytest.param(200, marks=slow)])
def test_notebook_that_prints_very_much(tmp_path, megabytes):
    place = Place(tmp_path)
    code, said, run = place.run(f"for _ in range({megabytes}):\n    print('kept' * 250_000)", CLOSE)
    assert (code, run["chapters"][0]["status"]) == (0, "passed"), said
    assert len(executed(place)) > megabytes * 1e6
    assert (tmp_path / "out/index.html").stat().st_size < 2e6
    assert place.clean()


def test_server_that_dies_under_a_chapter(tmp_path):
    place = Place(tmp_path)
    cell = "import json, os, qrecipe.serving as s\nos.kill(s.read_state(server.folder)['pid'], 9)\nimport time; time.sleep(2)"
    use = "import httpx; httpx.get(server.base_url + '/models')"
    verdict = checked(place, place.run("print('kept')", SERVER, cell, use, CLOSE), "ConnectError")
    assert "startup complete" in verdict["log_tail"]
    place.good()


def test_server_that_does_not_start(tmp_path):
    place = Place(tmp_path, "dies")
    verdict = checked(place, place.run("print('kept')", SERVER, CLOSE), "told to die")
    assert "told to die" in verdict["log_tail"]
    place.good()


def test_output_folder_that_exists(tmp_path):
    place = Place(tmp_path)
    (tmp_path / "out").mkdir()
    (tmp_path / "out/mine.txt").write_text("mine")
    code, said, run = place.run(CLOSE)
    assert code == 2 and "not an empty folder" in said and run == {}
    assert [p.name for p in (tmp_path / "out").iterdir()] == ["mine.txt"]
    assert place.clean()


@pytest.mark.parametrize("number", [signal.SIGINT, *MORE, pytest.param(signal.SIGHUP, marks=slow)], ids=name)
def test_interrupted_run_is_run_again(tmp_path, number):
    place = Place(tmp_path)
    cells = (
        "print('kept')",
        SERVER,
        f"open({str(tmp_path / 'here')!r}, 'w').close()\nimport time; time.sleep(300)",
        CLOSE,
    )
    run = place.run(*cells, wait=False)
    until((tmp_path / "here").exists, 60)
    run.send_signal(number)
    said = "".join(run.communicate(timeout=60))
    assert place.clean(), said
    if number != signal.SIGKILL:
        assert run.returncode == 130
        kept = json.loads((tmp_path / "out/run.json").read_text())
        assert not kept["passed"] and kept["chapters"][0]["reason"] == "the run was interrupted in it"
    assert "kept" in executed(place)
    assert place.run("print('kept')", SERVER, CLOSE, out="again")[0] == 0
    place.good()


def test_a_second_interrupt_does_not_cost_the_report(tmp_path):
    """Ctrl-C twice, or what a runner of jobs does: SIGINT, then SIGTERM while the first is being followed."""
    place = Place(tmp_path, "load=0.1 deaf")
    here = tmp_path / "here"
    run = place.run(
        "print('kept')", SERVER, f"open({str(here)!r}, 'w').close()\nimport time; time.sleep(300)", wait=False
    )
    until(here.exists, 60)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGINT):
        run.send_signal(number)
        time.sleep(1)
    said = "".join(run.communicate(timeout=60))
    assert run.returncode == 130 and "writing the report" in said
    assert "interrupted" in json.loads((tmp_path / "out/run.json").read_text())["chapters"][0]["reason"]
    assert "kept" in executed(place) and place.clean()


@pytest.mark.parametrize("number", [pytest.param(signal.SIGINT, marks=slow), *MORE], ids=name)
def test_papermill_by_hand_is_ended(tmp_path, number):
    place = Place(tmp_path)
    place.run("print('kept')", SERVER, "import time; time.sleep(300)", wait=False).kill()
    assert place.clean()
    words = [
        sys.executable,
        "-m",
        "papermill",
        tmp_path / "01_x.ipynb",
        tmp_path / "by-hand.ipynb",
        "-p",
        "model",
        tmp_path / "model",
    ]
    papermill = subprocess.Popen(
        list(map(str, words)), env=place.env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    assert wait_until(lambda: place.server().get("status") == "ready", 60)
    papermill.send_signal(number)
    papermill.wait(30)
    assert place.clean()


def test_disk_full_for_the_output(tmp_path):
    place = Place(tmp_path)
    with small_disk(tmp_path / "out", 512) as disk:
        code, said, run = place.run("print('kept' * 500_000)", SERVER, CLOSE)
        assert code in (1, 2) and "space" in said, said
        fill(disk)
        assert place.clean()
    place.good()


def test_output_that_cannot_be_written(tmp_path):
    place = Place(tmp_path)
    code, said, run = place.run(SERVER, CLOSE, out="/proc/qrecipe")
    assert code == 2 and "cannot write" in said and len(said.splitlines()) <= 2
    assert place.clean()


def test_two_runs_at_once_share_one_server(tmp_path):
    one, two = Place(tmp_path), Place(tmp_path)
    two.port = one.port
    runs = [
        p.run(SERVER, CLOSE, out=n, name=n, wait=False, open_=OPEN_AS.format(n)) for p, n in ((one, "a"), (two, "b"))
    ]
    said = [r.communicate(timeout=120) for r in runs]
    assert [r.returncode for r in runs] == [0, 0], said
    assert one.clean() and is_free(one.port)


OPEN_AS = 'import qrecipe\nchapter = qrecipe.begin("{}", engine=engine, model=model, weights=weights, port=port)'


def test_a_second_kernel_keeps_the_server_and_a_kept_one_is_found_again(tmp_path):
    place = Place(tmp_path)
    tiny_model(tmp_path / "model")
    words = ("serve", tmp_path / "model", "--engine", "cpu", "--port", place.port)
    serve = place.cli(*words, "--keep")
    said = "".join(serve.communicate(timeout=60))
    assert serve.returncode == 0, said
    time.sleep(1)
    token = place.server()["token"]
    assert place.run(SERVER, CLOSE)[0] == 0
    assert place.server()["token"] == token and place.server()["status"] == "ready"
    other = place.cli(*words, "--max-model-len", 4096)
    assert "max_model_len: it has 32768, you ask for 4096" in other.communicate(timeout=60)[1] and other.returncode == 2
    place.cli("stop", "--port", place.port).wait(30)
    place.good()


@pytest.mark.parametrize(
    "number", [signal.SIGTERM, *(pytest.param(n, marks=slow) for n in (signal.SIGINT, signal.SIGHUP, signal.SIGKILL))]
)
def test_a_kept_server_whose_start_is_ended_leaves_nothing(tmp_path, number):
    """`serve --keep` holds once the server is ready; a start that its terminal no longer waits for is ended."""
    place = Place(tmp_path, "load=60")
    tiny_model(tmp_path / "model")
    words = ("serve", tmp_path / "model", "--engine", "cpu", "--port", place.port)
    serve = place.cli(*words, "--keep")
    assert wait_until(lambda: place.part("worker"), 60)
    serve.send_signal(number)
    serve.wait(20)
    assert place.clean() and place.server()["status"] == "stopped"
    place.good()


def test_a_start_that_another_one_waits_for_goes_on(tmp_path):
    place = Place(tmp_path, "load=6")
    tiny_model(tmp_path / "model")
    words = ("serve", tmp_path / "model", "--engine", "cpu", "--port", place.port)
    first, second = place.cli(*words, "--keep"), place.cli(*words)
    assert wait_until(
        lambda: place.part("worker") and len(living_owners(place.state / f"servers/port-{place.port}")) == 2, 60
    )
    first.terminate()
    assert wait_until(lambda: place.server()["status"] == "ready", 60)
    second.send_signal(signal.SIGINT)  # the first one's --keep went with it
    second.wait(60)
    place.good()


def test_terminal_closed_under_serve(tmp_path):
    place = Place(tmp_path)
    tiny_model(tmp_path / "model")
    master, slave = pty.openpty()
    words = [
        sys.executable,
        "-m",
        "qrecipe.cli",
        "serve",
        str(tmp_path / "model"),
        "--engine",
        "cpu",
        "--port",
        str(place.port),
    ]
    serve = subprocess.Popen(
        ["setsid", "-c", *words], env=place.env, stdin=slave, stdout=slave, stderr=slave, start_new_session=True
    )
    os.close(slave)
    assert wait_until(lambda: place.server().get("status") == "ready", 60)
    os.close(master)  # the terminal window is closed: the kernel sends SIGHUP
    assert place.clean()
    serve.wait(20)
    place.good()
