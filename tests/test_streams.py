"""Streams recorded from vLLM (record_streams.py), replayed whole, split, merged and cut off."""

import json

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from openai import OpenAI
from replay import STREAMS, Reply, recorded, replay

from qrecipe.request import dissect
from qrecipe.teaching_model import answer

NAMES = sorted(f.stem for f in STREAMS.glob("*.jsonl"))


def asked(name: str) -> dict:
    return json.loads((STREAMS / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()[0])["asked"]


def play(name: str, reply: Reply | None = None, **params):
    body = asked(name)
    what = {"prompt": body["prompt"]} if "prompt" in body else {"messages": body["messages"]}
    with replay(reply or recorded(name, speed=20)) as (url, _):
        return dissect(OpenAI(base_url=url, api_key="none"), model="m", **what, **params)


def usage(name: str) -> int | None:
    """The completion tokens that the recording itself ends with."""
    data = b"".join(piece for _, piece in recorded(name).pieces).decode()
    events = [json.loads(line[6:]) for line in data.splitlines() if line.startswith("data: {")]
    return (events[-1].get("usage") or {}).get("completion_tokens")


def test_every_kind_of_stream_is_recorded():
    assert {"plain", "thinking", "thinking-zh", "usage-last", "no-usage", "length", "two-choices", "completion"} <= set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_tokens_add_up_to_the_usage(name):
    result = play(name)
    assert result.complete and result.finish_reason in {"stop", "length", "tool_calls"}
    if usage(name) is not None:
        assert sum(c.tokens for c in result.chunks) == result.completion_tokens == usage(name)
    times = [c.t for c in result.chunks]
    assert times == sorted(times) and 0 < result.ttft <= result.e2e


@pytest.mark.parametrize(
    ("name", "topic", "language"),
    [("plain", "kv_cache", "en"), ("usage-last", "kv_cache", "en"), ("no-usage", "kv_cache", "en"),
     ("thinking", "kv_cache", "en"), ("thinking-zh", "factorial", "zh")],
)  # fmt: skip
def test_words_are_those_of_the_book(name, topic, language):
    result, known = play(name), answer(topic, language)
    assert result.text.strip() == known.content
    assert result.reasoning is None if "thinking" not in name else result.reasoning.strip() == known.reasoning


def test_role_comes_before_any_token():
    first = play("plain").chunks[0]
    assert (first.kind, first.tokens, first.text) == ("role", 0, "")


def test_length_stops_at_the_ceiling():
    result = play("length")
    assert result.finish_reason == "length" and result.completion_tokens == asked("length")["max_tokens"]


def test_two_choices_are_counted_apart_and_together():
    result = play("two-choices")
    assert len(result.texts) == len(result.finish_reasons) == 2 and all(result.texts)
    counts = [sum(m for _, m in a) for a in result.arrivals()]
    assert sum(counts) == result.completion_tokens == usage("two-choices") and min(counts) > 0


@settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck))
@given(cuts=st.lists(st.integers(1, 400), min_size=1, max_size=60))
def test_a_proxy_that_splits_and_merges_changes_no_word_and_no_token(cuts):
    whole = b"".join(piece for _, piece in recorded("thinking-zh").pieces)
    pieces, at = [], 0
    for n, size in enumerate([*cuts, len(whole)]):
        pieces.append((0.001 * (n % 2), whole[at : at + size]))
        at += size
    result, known = play("thinking-zh", Reply([p for p in pieces if p[1]])), answer("factorial", "zh")
    assert result.text.strip() == known.content and result.reasoning.strip() == known.reasoning
    assert sum(c.tokens for c in result.chunks) == usage("thinking-zh") and result.complete


def test_cut_off_anywhere_keeps_the_beginning():
    pieces = recorded("plain", speed=100).pieces
    for keep in (2, len(pieces) // 2, len(pieces) - 2):
        result = play("plain", Reply(pieces[:keep], kill=True))
        assert not result.complete or result.finish_reason == "stop"
        assert answer("kv_cache").content.startswith(result.text)
