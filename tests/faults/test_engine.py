"""Kills on the real CPU engine at each stage; minutes each, so by `make faults` alone."""

import os

import pytest
from harness import Place, end, slow, swept, until  # noqa: F401 - swept is a fixture

pytestmark = [pytest.mark.engine, slow]
STAGES = {
    "before its engine": lambda place: place.part("api"),
    "loading": lambda place: place.part("core"),
    "ready": lambda place: place.server().get("status") == "ready",
    "in a request": lambda place: running(place),
}


def running(place) -> bool:
    from qrecipe.errors import RequestFailed
    from qrecipe.metrics import read_metrics

    try:
        return read_metrics(f"http://127.0.0.1:{place.port}/v1")["num_requests_running"] > 0
    except RequestFailed:
        return False


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    from qrecipe.chapter import teaching_model

    before = os.environ.get("QRECIPE_STATE")
    os.environ["QRECIPE_STATE"] = str(tmp_path_factory.mktemp("model"))
    try:
        return str(teaching_model())
    finally:
        os.environ.pop("QRECIPE_STATE")
        os.environ |= {"QRECIPE_STATE": before} if before else {}


@pytest.mark.parametrize(
    "stage, victim",
    [
        ("before its engine", "owner"), ("before its engine", "api"), ("loading", "owner"), ("loading", "core"),
        ("loading", "supervisor"), ("loading", "held core"), ("ready", "api"), ("ready", "held core"),
        ("in a request", "owner"), ("in a request", "supervisor"), ("in a request", "core"),
    ],
)  # fmt: skip
def test_kill(tmp_path, model, stage, victim):
    place = Place(tmp_path, model=model)
    owner = place.owner("begun", ask=stage == "in a request")
    until(lambda: STAGES[stage](place), 900)
    target = place.part(victim.removeprefix("held "))
    if victim == "owner":
        owner.kill()
    elif victim.startswith("held"):
        target.suspend()
    else:
        target.kill()
    if victim != "owner":
        until(lambda: place.server()["status"] in ("failed", "died"), 60)
        assert place.server()["why"]
        owner.kill()
    owner.communicate(timeout=30)
    assert place.clean(30), [(p.pid, p.cmdline()) for p in place.left()]


def test_next_start_after_a_kill_works(tmp_path, model):
    place = Place(tmp_path, model=model)
    owner = place.owner("begun")
    until(lambda: place.part("core"), 900)
    owner.kill()
    owner.communicate()
    assert place.clean(30)
    end(place.owner(), 60)
    assert place.clean(30)
