"""The set-up, its steps replaced: what is done again and what is not, and what a failure leaves."""

import os
import shutil
import subprocess
import sys

import pytest
from conftest import ROOT

from qrecipe import install
from qrecipe.errors import BadInput


@pytest.fixture
def steps(tmp_path, monkeypatch):
    """The words of each step that a set-up in a folder of its own takes; nothing is installed."""
    for name in (
        "requirements/cpu.txt",
        "requirements/gpu.txt",
        "requirements/uv.txt",
        "pyproject.toml",
        "qrecipe/alias.py",
    ):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    shutil.copytree(ROOT / "qrecipe/data/lab", tmp_path / "qrecipe/data/lab")
    monkeypatch.setattr(install, "ROOT", tmp_path)
    monkeypatch.setattr(install, "preflight", lambda *_: None)
    done = []

    def step(words, what, mend=""):
        done.append(what)
        if what == "making .venv":
            python = tmp_path / ".venv/bin/python"
            python.parent.mkdir(parents=True)
            python.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
            python.chmod(0o755)

    monkeypatch.setattr(install, "run", step)
    return done


def test_a_set_up_is_done_once_whichever_python_asks(steps, monkeypatch, capsys):
    install.set_up("cpu")
    assert (
        steps[0] == "making .venv"
        and capsys.readouterr().out.splitlines()[-1] == "set-up: ready: make lab, or make run"
    )
    steps.clear()
    for other in (str(install.ROOT / ".venv/bin/python"), "/usr/nowhere/python3"):  # activated, and another one on PATH
        monkeypatch.setattr(sys, "executable", other)
        monkeypatch.setattr(sys, "_base_executable", other)
        install.set_up("cpu")
    assert steps == []


def test_the_base_of_an_environment_makes_the_new_one(monkeypatch):
    python, version = install.find_python()
    base = subprocess.run(
        [python, "-c", "import sys; print(sys.prefix == sys.base_prefix)"], capture_output=True, text=True
    )
    assert base.stdout.strip() == "True" and version[:2] == sys.version_info[:2]


def test_a_set_up_that_fails_leaves_the_stamp_of_before(steps, monkeypatch):
    install.set_up("cpu")
    stamp, lock = install.ROOT / ".venv/qrecipe-stamp", install.ROOT / "requirements/cpu.txt"
    kept, locked = stamp.read_text(), lock.read_text()
    lock.write_text(locked + "# another\n")
    works = install.run

    def no_network(words, what, mend=""):
        raise BadInput(f"{what} failed")

    monkeypatch.setattr(install, "run", no_network)
    with pytest.raises(BadInput):
        install.set_up("cpu")
    assert stamp.read_text() == kept
    lock.write_text(locked)
    install.set_up("cpu")  # as it was: nothing to do, so no network is needed
    lock.write_text(locked + "# another\n")
    monkeypatch.setattr(install, "run", works)
    steps.clear()
    install.set_up("cpu")
    assert "making .venv" not in steps and len(steps) == 6 and stamp.read_text() != kept


@pytest.mark.parametrize("how", [KeyboardInterrupt, BadInput])
def test_a_change_of_engine_that_is_broken_off_is_mended_by_either_engine(steps, monkeypatch, how):
    """The stamp of before would say that nothing is to be done, with half of the other engine there."""
    monkeypatch.setattr(install, "choose_engine", lambda facts, engine: (engine, ""))
    install.set_up("cpu")
    works, words = install.run, []

    def breaks(step, what, mend=""):
        words.append(step)
        if "installing requirements" in what:
            raise how()

    monkeypatch.setattr(install, "run", breaks)
    with pytest.raises(how):
        install.set_up("gpu")
    assert words[-2][-2:] == ["qrecipe.alias", "remove"]  # else uv takes the alias for a vllm that is there
    assert words[-1][2] == "sync" and "requirements/gpu.txt" in words[-1]
    monkeypatch.setattr(install, "run", lambda step, what, mend="": words.append(step) or works(step, what, mend))
    for engine in ("cpu", "gpu"):
        words.clear()
        install.set_up(engine)
        assert [step[2] for step in words if f"requirements/{engine}.txt" in step] == ["sync"]
        words.clear()
        install.set_up(engine)
        assert words == []


def test_a_lock_that_has_changed_takes_nothing_away(steps, monkeypatch):
    install.set_up("cpu")
    lock, words = install.ROOT / "requirements/cpu.txt", []
    lock.write_text(lock.read_text() + "# another\n")
    monkeypatch.setattr(install, "run", lambda step, what, mend="": words.append(step))
    install.set_up("cpu")
    assert [step[2] for step in words if "requirements/cpu.txt" in step] == ["install"]


def test_the_other_engine_can_be_asked_for_inside_an_environment_that_has_one(steps, monkeypatch):
    asked = []
    monkeypatch.setattr(install, "choose_engine", lambda facts, engine: asked.append(facts) or ("cpu", ""))
    install.set_up("gpu")
    assert not asked[0].cpu_build and not asked[0].vllm


def test_packages_are_compiled_where_python_may_not_write_what_it_compiles(tmp_path):
    (tmp_path / "good").mkdir()
    (tmp_path / "good/good.py").write_text("x = 1\n")
    (tmp_path / "old.py").write_text("print 'a package of Python 2'\n")
    env = os.environ | {"PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run([sys.executable, "-c", install.COMPILE, tmp_path], env=env, capture_output=True)
    assert (done.returncode, done.stderr) == (0, b"") and list(tmp_path.glob("good/__pycache__/good.*.pyc"))
