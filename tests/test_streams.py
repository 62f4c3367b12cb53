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
KILLED = {"engine-killed": "EngineCore encountered an issue", "server-killed": "the server was stopped or died"}


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
    from record_streams import ASKED

    assert set(NAMES) == {*ASKED, *KILLED}


@pytest.mark.parametrize("name", sorted({*NAMES} - {*KILLED}))
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
     ("thinking", "kv_cache", "en"), ("thinking-zh", "factorial", "zh"), ("split", "factorial", "zh")],
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


@pytest.mark.parametrize("name", ["tool-named", "tool-required"])
def test_tool_calls_are_joined_from_their_chunks(name):
    result = play(name)
    wanted = asked(name)["tools"][0]["function"]
    fields = wanted["parameters"]["properties"]
    for call in result.tool_calls:
        given = json.loads(call["arguments"])
        assert call["name"] == wanted["name"] and call["id"].startswith("chatcmpl-tool-")
        assert given.keys() == fields.keys() and all(given[k] in fields[k]["enum"] for k in fields)
    assert len({call["id"] for call in result.tool_calls}) == (1 if name == "tool-named" else 2)
    assert result.text == "" and result.ttft_content is None and result.ttft < result.e2e
    assert result.finish_reason == ("tool_calls" if name == "tool-required" else "stop")


def test_characters_of_several_tokens_are_held_back_and_counted():
    from record_streams import HELD_BACK

    result = play("held-back")
    assert result.text == HELD_BACK
    many = [c for c in result.chunks if c.tokens > 1]
    assert {c.text for c in many} >= {"😀", "🙂"} and sum(spread for _, _, spread in result.gaps()) >= sum(
        c.tokens for c in many[1:]
    )
    assert any("more than one token" in note for note in result.notes)


def test_the_split_recording_cuts_inside_characters():
    pieces = [data for _, data in recorded("split").pieces]
    assert max(map(len, pieces)) <= 7 and any(0x80 <= data[0] < 0xC0 for data in pieces)


@pytest.mark.parametrize("name", KILLED)
def test_what_came_before_a_kill_is_kept_and_marked(name):
    result = play(name)
    assert not result.complete and result.finish_reason is None and KILLED[name] in result.notes[-1]
    assert result.text and answer("request", "en").content.startswith(result.text)
    assert result.completion_tokens == sum(c.tokens for c in result.chunks) >= 5 and result.usage is None


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
