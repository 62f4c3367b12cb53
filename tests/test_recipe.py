"""The recipe of an engine: words of this machine's own at the end of the command line."""

import pytest

from qrecipe.errors import BadInput
from qrecipe.recipe import recipe_for


def test_words_from_the_environment_come_before_those_of_the_caller(monkeypatch):
    monkeypatch.setenv("QRECIPE_SERVE_EXTRA", "--gdn-prefill-backend triton")
    recipe = recipe_for("gpu", "Qwen/Qwen3.5-4B", extra=("--seed", "1"))
    assert recipe.argv()[-4:] == ["--gdn-prefill-backend", "triton", "--seed", "1"]
    assert recipe.command().endswith("--gdn-prefill-backend triton --seed 1")
    assert recipe.differences(recipe.with_(extra=()))


def test_without_the_variable_nothing_is_added(monkeypatch):
    monkeypatch.delenv("QRECIPE_SERVE_EXTRA", raising=False)
    assert recipe_for("cpu", "Qwen/Qwen3.5-4B").extra == ()


def test_an_open_quote_is_named(monkeypatch):
    monkeypatch.setenv("QRECIPE_SERVE_EXTRA", "--seed '1")
    with pytest.raises(BadInput, match="QRECIPE_SERVE_EXTRA"):
        recipe_for("gpu", "Qwen/Qwen3.5-4B")
