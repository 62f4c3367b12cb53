"""request.py against a replay server, through the real openai client."""

import json
import math

import httpx
import pytest
from openai import OpenAI
from replay import Reply, chunk, error, replay, sse

from qrecipe.errors import BadInput, RequestFailed
from qrecipe.request import dissect
from qrecipe.request_checks import refusal

ASK = {"model": "m", "messages": [{"role": "user", "content": "Hi"}]}
USAGE = (26, 4)
CHAT = sse(
    chunk({"role": "assistant", "content": ""}, usage=(26, 0)),
    chunk({"content": "One "}, usage=(26, 1)),
    chunk({"content": "two "}, usage=(26, 2)),
    chunk({"content": "three"}, usage=(26, 3)),
    chunk({"content": ""}, finish="stop", usage=(26, 4)),
    chunk(usage=USAGE),
    "[DONE]",
    gap=0.03,
)


def ask(*replies, models=("m",), **params):
    with replay(*replies, models=models) as (url, seen):
        client = OpenAI(base_url=url, api_key="none")
        return dissect(client, **{**ASK, **params}), seen


def strip_usage(pieces, keep_last=False):
    out = []
    for wait, data in pieces:
        head, mark, _ = data.decode().partition(', "usage"')
        last = '"choices": []' in head
        out.append((wait, data if not mark or (keep_last and last) else (head + "}\n\n").encode()))
    return [p for p in out if keep_last or b'"choices": []' not in p[1]]


def test_role_only_first_chunk_is_no_token():
    result, seen = ask(Reply(CHAT))
    assert [c.kind for c in result.chunks] == ["role", "content", "content", "content", "finish", "usage"]
    assert [c.tokens for c in result.chunks] == [0, 1, 1, 1, 1, 0]
    assert result.ttft == result.chunks[1].t > result.chunks[0].t + 0.01
    assert result.text == "One two three" and result.reasoning is None and result.finish_reason == "stop"
    assert result.complete and result.notes == [] and result.counted_by == "usage of every chunk"
    assert seen[0]["stream_options"] == {"include_usage": True, "continuous_usage_stats": True}
    assert seen[0]["stream"] is True and seen[0]["path"] == "/v1/chat/completions"


def test_times_follow_their_formulas():
    result, _ = ask(Reply(CHAT))
    n = result.completion_tokens
    assert n == 4 and len(result.itl) == n - 1
    assert math.isclose(result.tpot, (result.e2e - result.ttft) / (n - 1))
    assert math.isclose(sum(result.itl), result.e2e - result.ttft)
    assert result.e2e == result.chunks[4].t  # the usage comes 30 ms later and is not waited for
    assert math.isclose(result.tps, n / result.e2e) and math.isclose(result.prefill_tps, 26 / result.ttft)
    assert all(0.01 < gap < 0.2 for gap in result.itl)
    assert 0 <= result.connect < result.marks["sent"] < result.marks["headers"] < result.ttft
    table = {row.name: row for row in result.table()}
    assert (
        table["TPOT"].unit == "ms"
        and table["TPOT"].formula == "(E2E - TTFT) / (n - 1)"
        and "perf_counter" in table["TTFT"].clock
    )
    assert table["prompt tokens"].value == 26 and table["prompt tokens"].clock == "server, usage"


def test_an_open_connection_costs_nothing_to_connect():
    with replay(Reply(CHAT), Reply(CHAT)) as (url, _):
        client = OpenAI(base_url=url, api_key="none")
        first = dissect(client, **ASK)
        client.models.list()  # read to its end, so its connection stays open
        second = dissect(client, **ASK)
    assert first.connect > 0 and second.connect == 0
    assert client._client.event_hooks["request"] == []


def test_reasoning_comes_first_and_has_its_own_clock():
    pieces = sse(
        chunk({"role": "assistant", "content": ""}, usage=(9, 0)),
        chunk({"reasoning": "Let "}, usage=(9, 1)),
        chunk({"reasoning": "me."}, usage=(9, 2)),
        chunk({"content": "\n\nYes"}, usage=(9, 5)),
        chunk({"content": ""}, finish="stop", usage=(9, 6)),
        chunk(usage=(9, 6)),
        "[DONE]",
        gap=0.02,
    )
    result, _ = ask(Reply(pieces))
    assert result.reasoning == "Let me." and result.text == "\n\nYes"
    assert result.ttft == result.chunks[1].t and result.ttft_content == result.chunks[3].t
    assert result.reasoning_tokens == 2 and result.completion_tokens == 6
    assert [spread for _, _, spread in result.gaps()] == [False, True, True, True, False]  # three tokens in one chunk
    assert len(result.itl) == 5 and len(result.steps) == 3
    assert any("more than one token" in note for note in result.notes)


def test_older_servers_call_it_reasoning_content():
    pieces = sse(
        chunk({"reasoning_content": "Hm."}, usage=(9, 1)),
        chunk({"content": "A"}, finish="stop", usage=(9, 2)),
        "[DONE]",
    )
    result, _ = ask(Reply(pieces))
    assert result.reasoning == "Hm." and result.text == "A" and result.usage["completion_tokens"] == 2


def test_one_delta_may_end_the_reasoning_and_open_the_answer():
    pieces = sse(
        chunk({"reasoning": "ab", "content": "cd"}, usage=(9, 4)),
        chunk({"content": ""}, finish="stop", usage=(9, 5)),
        "[DONE]",
    )
    result, _ = ask(Reply(pieces))
    assert [(c.kind, c.tokens) for c in result.chunks] == [("reasoning", 2), ("content", 2), ("finish", 1)]
    assert result.ttft == result.ttft_content and len(result.itl) == 1 and len(result.steps) == 1


def test_without_usage_the_tokenizer_counts_and_says_so():
    class Letters:
        def encode(self, text, add_special_tokens=True):
            return list(text)

    result, _ = ask(Reply(strip_usage(CHAT)), tokenizer=Letters())
    assert result.usage is None and result.counted_by == "tokenizer" and result.completion_tokens == 13
    assert any("tokenizer" in note for note in result.notes)
    row = next(r for r in result.table() if r.name == "completion tokens")
    assert (row.clock, row.formula) == ("tokenizer", "n = counted: tokenizer")


def test_without_usage_and_tokenizer_chunks_are_counted_and_it_says_so():
    result, _ = ask(Reply(strip_usage(CHAT)))
    assert result.counted_by == "chunks" and result.completion_tokens == 3
    assert any("chunk may hold several tokens" in note for note in result.notes)


def test_usage_at_the_end_only_gives_one_token_a_chunk_and_one_for_the_end():
    result, _ = ask(Reply(strip_usage(CHAT, keep_last=True)))
    assert result.counted_by == "usage, one token a chunk"
    assert [c.tokens for c in result.chunks] == [0, 1, 1, 1, 1, 0] and result.notes == []


def test_merged_chunks_share_the_usage_by_length():
    pieces = sse(chunk({"content": "abcdef"}), chunk({"content": "gh"}, finish="length"), chunk(usage=(3, 8)), "[DONE]")
    result, _ = ask(Reply(pieces))
    assert [c.tokens for c in result.chunks] == [6, 2, 0] and any("shared out" in note for note in result.notes)


def test_token_ids_count_where_usage_does_not():
    pieces = sse(
        chunk({"content": "ab"}, token_ids=[1, 2]), chunk({"content": "c"}, finish="stop", token_ids=[3]), "[DONE]"
    )
    result, _ = ask(Reply(pieces))
    assert [c.tokens for c in result.chunks] == [2, 1] and result.counted_by == "token entries of every chunk"


def test_a_server_that_refuses_stream_options_is_asked_again_with_less():
    refusal = error(400, "Unknown parameter: stream_options.continuous_usage_stats")
    result, seen = ask(refusal, Reply(strip_usage(CHAT, keep_last=True)))
    assert [s.get("stream_options") for s in seen][1] == {"include_usage": True}
    assert result.complete and "refused stream_options" in result.notes[0]


def test_tool_calls_are_joined():
    def call(**fn):
        return {"tool_calls": [{"index": 0, **fn}]}

    pieces = sse(
        chunk({"role": "assistant", "content": ""}, usage=(9, 0)),
        chunk(call(id="c1", type="function", function={"name": "clock", "arguments": ""}), usage=(9, 5)),
        chunk(call(function={"arguments": '{"city": '}), usage=(9, 8)),
        chunk(call(function={"arguments": '"Oslo"}'}), usage=(9, 10)),
        chunk({"content": ""}, finish="tool_calls", usage=(9, 11)),
        chunk(usage=(9, 11)),
        "[DONE]",
    )
    result, _ = ask(Reply(pieces))
    assert result.tool_calls == [{"id": "c1", "name": "clock", "arguments": '{"city": "Oslo"}'}]
    assert result.finish_reason == "tool_calls" and result.text == "" and result.ttft_content is None
    assert result.ttft == result.chunks[1].t and result.chunks[1].kind == "tool"


def test_several_choices_are_kept_apart():
    pieces = sse(
        chunk({"role": "assistant", "content": ""}, usage=(9, 0)),
        chunk({"role": "assistant", "content": ""}, index=1, usage=(9, 0)),
        chunk({"content": "a"}, usage=(9, 1)),
        chunk({"content": "x"}, index=1, usage=(9, 1)),
        chunk({"content": "b"}, finish="length", usage=(9, 2)),
        chunk({"content": "y"}, index=1, usage=(9, 2)),
        chunk({"content": ""}, index=1, finish="stop", usage=(9, 3)),
        chunk(usage=(9, 5)),
        "[DONE]",
    )
    result, seen = ask(Reply(pieces), n=2)
    assert result.texts == ["ab", "xy"] and result.finish_reasons == ["length", "stop"] and seen[0]["n"] == 2
    assert result.completion_tokens == 5 and len(result.itl) == 3


def test_an_empty_answer_is_an_answer():
    pieces = sse(
        chunk({"role": "assistant", "content": ""}, usage=(9, 0)),
        chunk({"content": ""}, finish="stop", usage=(9, 1)),
        chunk(usage=(9, 1)),
        "[DONE]",
    )
    result, _ = ask(Reply(pieces))
    assert (
        result.text == ""
        and result.complete
        and result.ttft_content is None
        and result.tpot is None
        and result.itl == []
    )
    assert result.ttft == result.e2e


def test_completions_endpoint():
    def text(t, finish=None, usage=None):
        return {
            "id": "c",
            "object": "text_completion",
            "created": 1,
            "model": "m",
            "choices": [{"index": 0, "text": t, "finish_reason": finish, "logprobs": None}],
            "usage": usage,
        }

    u = {"prompt_tokens": 3, "completion_tokens": 1, "total_tokens": 4}
    pieces = sse(text(" A", usage=u), text(" B", "length", usage={**u, "completion_tokens": 2}), "[DONE]")
    result, seen = ask(Reply(pieces), messages=None, prompt="1 2 3", max_tokens=2)
    assert result.text == " A B" and result.endpoint == "/v1/completions" == seen[0]["path"] and len(result.itl) == 1


@pytest.mark.parametrize("size", [1, 7, 1000])
def test_bytes_may_be_cut_anywhere(size):
    events = sse(
        chunk({"content": "阶乘"}, usage=(9, 1)),
        chunk({"content": "是 120。😀"}, finish="stop", usage=(9, 5)),
        chunk(usage=(9, 5)),
        "[DONE]",
    )
    data = b"".join(piece for _, piece in events)
    result, _ = ask(Reply([(0, data[i : i + size]) for i in range(0, len(data), size)]))
    assert result.text == "阶乘是 120。😀" and result.completion_tokens == 5 and result.complete


def test_server_killed_mid_stream_keeps_what_came():
    result, _ = ask(Reply(CHAT[:3], kill=True))
    assert not result.complete and result.text == "One two " and result.finish_reason is None
    assert result.completion_tokens == 2 and result.prompt_tokens == 26 and len(result.itl) == 1
    assert "stream broke" in result.notes[-1] and "server was stopped or died" in result.notes[-1]


def test_error_event_mid_stream_keeps_what_came():
    pieces = [
        *CHAT[:2],
        *sse(
            {"error": {"message": "EngineCore encountered an issue.", "type": "InternalServerError", "code": 500}},
            "[DONE]",
        ),
    ]
    result, _ = ask(Reply(pieces))
    assert not result.complete and result.text == "One " and "EngineCore encountered an issue" in result.notes[-1]


def test_stream_that_just_ends_is_not_complete():
    result, _ = ask(Reply(CHAT[:3]))
    assert not result.complete and "without a finish reason" in result.notes[-1]


def test_silence_mid_stream_is_a_timeout_and_keeps_what_came():
    result, _ = ask(Reply([*CHAT[:2], (1.0, CHAT[2][1])]), timeout=0.3)
    assert not result.complete and result.text == "One " and "silent longer" in result.notes[-1]


@pytest.mark.parametrize(
    ("reply", "words"),
    [
        (error(404, "The model `m` does not exist."), "it serves 'qwen3.5-4b'"),
        (error(401, "Unauthorized"), "--api-key"),
        (error(429, "slow down", **{"Retry-After": "7"}), "wait 7 s"),
        (error(500, "boom"), "500 (boom)"),
        (error(503, "overloaded"), "503"),
        (error(400, "This model's maximum context length is 32768 tokens. However, you requested 40000 output tokens and your prompt contains 26 input tokens, for a total of 40026 tokens."),
         "the prompt (26 tokens) and max_tokens=40000 do not fit the context of 32768 tokens: ask for at most 32742 with max_tokens"),
        (error(400, "This model's maximum context length is 4096 tokens. However, you requested 1 output tokens and your prompt contains at least 4096 input tokens, for a total of at least 4097 tokens."),
         "at least 4096 tokens) and max_tokens=1 do not fit the context of 4096 tokens: shorten the prompt, ask for less with max_tokens, or serve"),
        (error(400, "max_tokens=40000 cannot be greater than max_model_len=max_total_tokens=32768. Please request fewer output tokens. (parameter=max_tokens, value=40000)"),
         "max_tokens=40000 is more than the whole context of 32768 tokens"),
        (error(400, "This model's maximum context length is 4096 tokens. However, you requested 128 output tokens and your prompt contains 900000 characters (more than 500000 characters, which is the upper bound for 3968 input tokens)."),
         "900000 characters"),
        (error(400, "This model's maximum context length is 32768 tokens. However, you requested 32768 output tokens and your prompt contains 64 characters (more than 0 characters, which is the upper bound for 0 input tokens)."),
         "the prompt (64 characters) and max_tokens=32768 do not fit the context of 32768 tokens: ask for less with max_tokens, or serve"),
        (error(500, "Cannot load local files without `--allowed-local-media-path`"), "fetches no picture from there (500: Cannot load local files"),
        (error(400, "The URL must be from one of the allowed domains: ['none.invalid']. Input URL domain: 127.0.0.1."), "send the picture itself, as qrecipe.vision.data_url"),
        (error(400, "At most 4 image(s) may be provided in one prompt."), "at most 4 image(s) in one prompt"),
        (error(400, "top_p must be in (0, 1]"), "refused the request (400): top_p must be"),
        (Reply([(0, b"<html>hello</html>")], 200, {"Content-Type": "text/html"}), "text/html instead of an event stream"),
        (Reply([(0, b"data: not json\n\n")]), "not JSON"),
        (Reply([(0, b"data: [DONE]\n\n")]), "without sending a chunk"),
        (Reply(sse(chunk({"content": ["a"]}), "[DONE]")), "not of OpenAI's form"),
        (Reply(sse(chunk({"content": "a"}, usage=(1, 1)), chunk(usage=(9, 2)) | {"usage": {"completion_tokens": "4"}}, chunk({"tool_calls": 3}))), "not of OpenAI's form"),
        (Reply([], kill=True), "the connection to"),
        (Reply(sse({"error": {"message": "bad", "code": 500}})), "bad"),
    ],
)  # fmt: skip
def test_refusals_are_one_sentence(reply, words):
    with pytest.raises(RequestFailed) as caught:
        ask(reply, models=("qwen3.5-4b",))
    assert words in str(caught.value) and "\n" not in str(caught.value)


def test_404_for_a_missing_path_points_at_base_url():
    with pytest.raises(RequestFailed, match="ends in /v1"):
        ask(error(404, "Not Found"))


def test_nothing_listens():
    with pytest.raises(RequestFailed, match="nothing answers at http://127.0.0.1:9/v1"):
        dissect(OpenAI(base_url="http://127.0.0.1:9/v1", api_key="none"), **ASK)


@pytest.mark.parametrize(
    ("params", "words"),
    [
        ({"max_tokens": 0}, "max_tokens is 0"),
        ({"max_tokens": -5}, "max_tokens is -5"),
        ({"max_tokens": 1.5}, "whole number"),
        ({"max_tokens": True}, "max_tokens is True"),
        ({"temperature": -0.1}, "temperature is -0.1"),
        ({"temperature": float("nan")}, "temperature is nan"),
        ({"top_p": 0}, "top_p is 0"),
        ({"top_p": 1.1}, "top_p is 1.1; a number from 1e-06 to 1 is expected"),
        ({"n": 0}, "n is 0"),
        ({"timeout": 0}, "timeout is 0"),
        ({"presence_penalty": 3}, "presence_penalty is 3"),
        ({"extra_body": {"top_k": -2}}, "top_k is -2"),
        ({"extra_body": "x"}, "extra_body is str"),
        ({"top_k": 20}, "goes into extra_body"),
        ({"stream": False}, "always streams"),
        ({"messages": []}, "messages must be"),
        ({"messages": None}, "either messages"),
        ({"prompt": "x"}, "either messages"),
        ({"messages": None, "prompt": ""}, "not empty"),
        ({"model": " "}, "model is"),
    ],
)
def test_bad_parameters_are_refused_before_anything_is_sent(params, words):
    with pytest.raises(BadInput) as caught:
        dissect(OpenAI(base_url="http://127.0.0.1:9/v1", api_key="none"), **{**ASK, **params})
    assert words in str(caught.value)


def test_an_asynchronous_client_is_refused():
    from openai import AsyncOpenAI

    with pytest.raises(BadInput, match="asynchronous"):
        dissect(AsyncOpenAI(base_url="http://127.0.0.1:9/v1", api_key="none"), **ASK)


def test_an_earlier_answer_may_be_a_message_again():
    from httpx import Timeout
    from openai.types.chat import ChatCompletionMessage

    earlier = ChatCompletionMessage(role="assistant", content="Hello")
    result, seen = ask(Reply(CHAT), messages=[*ASK["messages"], earlier, *ASK["messages"]], timeout=Timeout(5))
    assert result.complete and seen[0]["messages"][1]["content"] == "Hello"


def test_as_dict_is_json():

    result, _ = ask(Reply(CHAT))
    again = json.loads(json.dumps(result.as_dict()))
    assert again["text"] == "One two three" and len(again["chunks"]) == 6 and again["finish_reason"] == "stop"


def command_line(monkeypatch, capsys, *words):
    """(exit code, stdout, stderr) of `qrecipe dissect WORDS`."""
    import sys

    from qrecipe import cli

    monkeypatch.setattr(sys, "argv", ["qrecipe", "dissect", *words])
    with pytest.raises(SystemExit) as end:
        cli.main()
    return end.value.code, *capsys.readouterr()


def test_the_command_prints_the_answer_and_each_figure(monkeypatch, capsys):
    with replay(Reply(CHAT)) as (url, seen):
        code, out, _ = command_line(monkeypatch, capsys, "--url", url, "--prompt", "Hi", "--max-tokens", "4")
    assert code == 0 and "One two three" in out and "(E2E - TTFT) / (n - 1)" in out
    assert seen[0]["messages"] == ASK["messages"] and seen[0]["max_tokens"] == 4


def test_the_command_asks_servers_that_know_only_openai_s_own_fields(monkeypatch, capsys):
    with replay(
        error(400, "Unrecognized request argument supplied: chat_template_kwargs"), Reply(strip_usage(CHAT))
    ) as (url, seen):
        code, out, _ = command_line(monkeypatch, capsys, "--url", url, "--model", "gpt", "--prompt", "Hi", "--json")
    assert code == 0 and "chat_template_kwargs" not in seen[1] and "chat_template_kwargs" in seen[0]
    assert "asked without" in json.loads(out)["notes"][-1]


def test_the_command_s_exit_code_tells_a_broken_stream_and_bad_input(monkeypatch, capsys, tmp_path):
    with replay(Reply(CHAT[:3], kill=True)) as (url, _):
        code, out, _ = command_line(monkeypatch, capsys, "--url", url, "--model", "m")
        assert code == 1 and "One two" in out and "stream broke" in out
    (tmp_path / "a.png").write_text("no picture")
    for words, said in [
        (["--image", str(tmp_path / "a.png")], "not a picture"),
        (["--max-tokens", "0"], "--max-tokens is 0"),
    ]:
        code, _, err = command_line(monkeypatch, capsys, "--url", "http://127.0.0.1:9/v1", "--model", "m", *words)
        assert code == 2 and said in err and len(err.splitlines()) == 1
    code, _, err = command_line(monkeypatch, capsys, "--url", "http://127.0.0.1:9/v1")
    assert code == 2 and "no server answers" in err


@pytest.mark.parametrize(
    "message, said",
    [
        ("1 validation error:\n  {'type': 'int_parsing', 'loc': ('body', 'max_tokens'), 'msg': 'Input should be a valid integer', 'input': 'five'}",
         "the server refused max_tokens: Input should be a valid integer."),
        ("1 validation error:\n  {'type': 'x', 'loc': ('body', 'stop', 'str'), 'msg': \"it's no text\", 'input': 5}", "the server refused stop: it's no text."),
        ("max_tokens must be at least 1, got -1.", "the server refused the request (400): max_tokens must be at least 1, got -1."),
    ],
)  # fmt: skip
def test_a_refused_reply_is_one_sentence(message, said):
    assert str(refusal(httpx.Response(400, json={"error": {"message": message}}))) == said
