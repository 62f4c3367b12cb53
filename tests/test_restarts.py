"""restarts.py: another server for the length of a block, and what an earlier one gave."""

import json
import sys
from types import SimpleNamespace

import pytest
from conftest import ROOT

from qrecipe import restarts
from qrecipe.errors import BadInput
from qrecipe.recipe import ServeRecipe

sys.path.insert(0, str(ROOT / "benchmarks"))
from keep_restarts import keep  # noqa: E402


class Stub:
    """Stands in for Server: notes what was started and stopped."""

    seen: list = []

    @classmethod
    def start(cls, recipe):
        cls.seen.append(recipe)
        return cls()

    def stop(self):
        Stub.seen.append("stopped")


def chapter(engine):
    recipe = ServeRecipe("m", port=8000, env={"A": "1"})
    return SimpleNamespace(engine=engine, name="05_dissect_request", recipe=recipe.with_, server=lambda: Stub())


@pytest.fixture(autouse=True)
def stub(monkeypatch):
    monkeypatch.setattr(restarts, "Server", Stub)
    Stub.seen = []


def test_another_server_has_the_next_port_and_ends_with_the_block():
    with pytest.raises(ZeroDivisionError), restarts.restarted(chapter("cpu"), enable_prefix_caching=True):
        assert Stub.seen[0].port == 8001 and Stub.seen[0].enable_prefix_caching
        assert Stub.seen[0].env == {"A": "1"}
        raise ZeroDivisionError
    assert Stub.seen[1:] == ["stopped"]


def test_on_a_gpu_the_chapter_s_own_server_goes_first():
    with restarts.restarted(chapter("gpu")):
        assert Stub.seen[0] == "stopped"


def test_nothing_is_started_beside_another_s_server():
    with pytest.raises(BadInput, match="leave base_url empty"), restarts.restarted(chapter("attached")):
        pass
    assert Stub.seen == []


@pytest.mark.parametrize("name", ["05_dissect_request", "06_multimodal", "08_benchmark"])
def test_each_lesson_has_a_recorded_result_with_device_version_and_date(name):
    rows, stamp = restarts.recorded(SimpleNamespace(name=name, engine="attached"))
    assert len(rows) >= 2 and "cores" in stamp and "vLLM 0.27.0" in stamp and "2026-" in stamp


def test_a_result_is_kept_only_when_there_is_one(tmp_path, monkeypatch):
    monkeypatch.setattr(restarts, "FOLDER", tmp_path / "kept")
    facts = {
        "chapter": "05_dissect_request",
        "engine": "gpu",
        "device": "H",
        "versions": {"vllm": "1"},
        "date": "2026-01-01T",
        "model": {},
    }
    (tmp_path / "a.json").write_text(json.dumps(facts))
    with pytest.raises(BadInput, match="restarts True"):
        keep(tmp_path / "a.json")
    (tmp_path / "a.json").write_text(json.dumps(facts | {"restarts": [[1, 2]]}))
    keep(tmp_path / "a.json", "busy")
    assert restarts.recorded(chapter("gpu")) == ([[1, 2]], "recorded: H, vLLM 1, 2026-01-01 (busy)")
    assert restarts.recorded(chapter("cpu")) == ([], "nothing recorded")
