"""Each kill at each stage, on the stub's process tree: nothing is left, the cause is named, the next start works."""

import signal
import time

import pytest
from harness import Place, end, slow, swept, until  # noqa: F401 - swept is a fixture

STAGES = {  # words for the stub, and when the stage is reached
    "loading": ("load=60", lambda place: place.part("worker")),
    "before bind": ("load=0.1 bind=60", lambda place: "loading weights" in log(place)),
    "ready": ("load=0.1", lambda place: place.server().get("status") == "ready"),
    "in a request": ("load=0.1", lambda place: "takes long" in log(place)),
}
SIGNALS = [signal.SIGINT, signal.SIGTERM, signal.SIGKILL, signal.SIGHUP]


def pairs(stages, others, quick) -> list:
    """All pairs; those that are not `quick` only where all faults are asked for."""
    all_ = [(s, o) for s in stages for o in others]
    return [pytest.param(s, o, id=f"{s}-{getattr(o, 'name', o)}", marks=() if quick(s, o) else slow) for s, o in all_]


def log(place) -> str:
    try:
        with open(place.server()["log"]) as f:
            return f.read()
    except (OSError, KeyError):
        return ""


def at(stage: str, tmp_path, **env):
    """A place whose server is at this stage, and its one owner."""
    words, reached = STAGES[stage]
    place = Place(tmp_path, words, **env)
    owner = place.owner("begun", ask=stage == "in a request")
    until(lambda: reached(place) and place.part("api"))
    if stage == "ready":
        assert owner.stdout.readline() == "ready\n"
    time.sleep(1.5)  # the supervisor has seen the engine's parts twice
    return place, owner


@pytest.mark.parametrize("stage, number", pairs(STAGES, SIGNALS, lambda s, n: n is signal.SIGKILL or s == "ready"))
def test_owner(tmp_path, stage, number):
    place, owner = at(stage, tmp_path)
    owner.send_signal(number)
    owner.wait(20)
    assert place.clean()
    assert place.server()["status"] == "stopped"


@pytest.mark.parametrize("stage, part", pairs(STAGES, ["supervisor", "api", "core"], lambda s, p: s != "before bind"))
def test_part(tmp_path, part, stage):
    place, owner = at(stage, tmp_path)
    place.part(part).kill()
    until(lambda: place.server()["status"] in ("failed", "died"))
    why = {"supervisor": "its supervisor was killed", "api": "exit code -9", "core": "VLLM::EngineCor"}[part]
    assert why in place.server()["why"]
    said = end(owner)
    if "load" in stage or "bind" in stage:  # its owner was waiting: one sentence with the log's path
        assert "ServerFailed" in said and place.server()["log"] in said
    place.good()


def test_worker_in_a_request(tmp_path):
    place, owner = at("in a request", tmp_path)
    place.part("worker").kill()
    until(lambda: place.server()["status"] == "died")
    assert "VLLM::Worker" in place.server()["why"]
    end(owner)
    place.good()


def test_guard_is_replaced_and_the_new_one_does_its_work(tmp_path):
    place, owner = at("ready", tmp_path)
    place.part("guard").kill()
    time.sleep(1)
    assert place.server()["status"] == "ready"
    place.part("supervisor").kill()
    assert end(owner) == ""
    place.good()


def test_guard_and_supervisor_at_once(tmp_path):
    """The kernel then ends the API server; the parts of its engine are ended by the next start at the latest."""
    place, owner = at("ready", tmp_path)
    guard, supervisor = place.part("guard"), place.part("supervisor")
    guard.suspend()
    supervisor.kill()
    guard.kill()
    until(lambda: not place.part("api"))
    end(owner)
    again = place.owner()
    assert len([p for p in place.left() if p.name() == "VLLM::EngineCor"]) == 1
    end(again)
    place.good()


@pytest.mark.parametrize(
    "stage, part", pairs(STAGES, ["api", "core"], lambda s, p: (s, p) in (("loading", "api"), ("ready", "core")))
)
def test_held_by_a_stop_signal(tmp_path, part, stage):
    place, owner = at(stage, tmp_path, QRECIPE_HELD="1")
    place.part(part).suspend()
    until(lambda: place.server()["status"] in ("failed", "died"))
    assert "SIGSTOP" in place.server()["why"]
    end(owner)
    place.good()


@pytest.mark.parametrize("words, why", [("silent", "it stalled"), ("dies", "exit code 1")])
def test_a_start_that_never_comes(tmp_path, words, why):
    place = Place(tmp_path, words, QRECIPE_STALL="2")
    said = end(place.owner("begun"), 30)
    assert why in place.server()["why"] and place.server()["log"] in said
    place.good()


def test_deaf_to_sigterm(tmp_path):
    place, owner = at("ready", tmp_path)
    place.env["STUB"] = "deaf"
    end(owner)
    place.good()
