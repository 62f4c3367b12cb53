"""metrics.py: vLLM's /metrics page, read and subtracted."""

from pathlib import Path

import pytest
from openai import OpenAI
from replay import Reply, error, replay
from test_request import ASK, CHAT

from qrecipe import metrics
from qrecipe.dissection import Chunk, Dissection
from qrecipe.errors import RequestFailed
from qrecipe.metrics import Snapshot, compare, difference, parse_metrics, read_metrics, round_trip
from qrecipe.request import dissect

PAGE = """\
# HELP python_gc_objects_collected_total Objects collected
# TYPE python_gc_objects_collected_total counter
python_gc_objects_collected_total{generation="0"} 500.0
# TYPE vllm:request_success counter
vllm:request_success_total{engine="0",finished_reason="stop",model_name="m"} 3.0
vllm:request_success_total{engine="0",finished_reason="length",model_name="m"} 2.0
# TYPE vllm:time_to_first_token_seconds histogram
vllm:time_to_first_token_seconds_bucket{engine="0",le="0.001",model_name="m"} 0.0
vllm:time_to_first_token_seconds_bucket{engine="0",le="+Inf",model_name="m"} 5.0
vllm:time_to_first_token_seconds_count{engine="0",model_name="m"} 5.0
vllm:time_to_first_token_seconds_sum{engine="0",model_name="m"} 0.5
# TYPE vllm:kv_cache_usage_perc gauge
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.25
"""


def after(requests=1, **more) -> Snapshot:
    values = {
        "request_success_total": requests, "prompt_tokens_total": 26, "generation_tokens_total": 4,
        "time_to_first_token_seconds_sum": 0.1 * requests, "time_to_first_token_seconds_count": requests,
        "inter_token_latency_seconds_sum": 0.06, "inter_token_latency_seconds_count": 3,
        "e2e_request_latency_seconds_sum": 0.16, "e2e_request_latency_seconds_count": requests,
    }  # fmt: skip
    return Snapshot(values | more)


def ours(ttft=0.101, step=0.0201, tokens=(1, 1, 1, 1)):
    chunks = [Chunk(0.09, "role", "", 0)]
    chunks += [Chunk(ttft + n * step, "content", "x", m) for n, m in enumerate(tokens)]
    return Dissection("m", "/v1/chat/completions", chunks, ["x"], [None], [], ["stop"], None, 26, sum(tokens))


def test_page_is_summed_over_labels_without_buckets():
    page = parse_metrics(PAGE)
    assert page.finished == 5 and page["time_to_first_token_seconds_sum"] == 0.5 and page["kv_cache_usage_perc"] == 0.25
    assert not any("bucket" in name or "python" in name for name in page.values)


def test_difference_gives_means_and_none_without_samples():
    d = difference(Snapshot({}), after())
    assert (d.requests, d.steps, d.prompt_tokens, d.generation_tokens) == (1, 3, 26, 4)
    assert d.ttft == pytest.approx(0.1) and d.itl == pytest.approx(0.02) and d.queue is None and d.hit_rate is None


def test_hit_rate_is_of_the_tokens_asked_for():
    assert (
        difference(Snapshot({}), after(prefix_cache_queries_total=1200, prefix_cache_hits_total=900)).hit_rate == 0.75
    )


def test_clocks_agree_within_three_milliseconds_or_five_percent():
    rows = {r.name: r for r in compare(ours(), difference(Snapshot({}), after()))}
    assert all(r.agrees for r in rows.values()) and rows["TTFT"].difference == pytest.approx(1.0)
    rows = {r.name: r for r in compare(ours(ttft=0.11), difference(Snapshot({}), after()))}
    assert not rows["TTFT"].agrees and rows["ITL, mean"].agrees


def test_http_is_taken_off_what_the_server_cannot_see():
    rows = {r.name: r for r in compare(ours(ttft=0.11), difference(Snapshot({}), after()), http=0.009)}
    assert rows["TTFT - HTTP"].agrees and rows["TTFT - HTTP"].ours == pytest.approx(101)
    assert rows["ITL, mean"].ours == pytest.approx(20.1)
    assert (rows["HTTP alone"].ours, rows["HTTP alone"].agrees) == (pytest.approx(9), None)
    assert rows["TTFT as measured"].difference == pytest.approx(10) and rows["TTFT as measured"].agrees is None


def held(monkeypatch, *runs):
    """`hold` where each request gives one of `runs`: (our TTFT, the server's, tokens that the server counted, seconds
    that it waited for a core). What happens is kept in `held.order`."""
    left, order, clock = [runs[0], *runs], [], [0.0]  # the first warms up
    server = [
        difference(Snapshot({}), after(time_to_first_token_seconds_sum=b, generation_tokens_total=n))
        for _, b, n, _ in left
    ]

    def request(*_, **__):
        order.append("request")
        ttft, _, _, waited = left.pop(0)
        clock[0] += waited
        return ours(ttft=ttft)

    monkeypatch.setattr(metrics, "round_trip", lambda *_, **__: order.append("refusals") or 0.002)
    monkeypatch.setattr(metrics, "read_metrics", lambda *_, **__: order.append("metrics"))
    monkeypatch.setattr(metrics, "difference", lambda *_: server.pop(0))
    monkeypatch.setattr(metrics, "dissect", request)
    monkeypatch.setattr(metrics, "_threads", lambda _: ["stat"])
    monkeypatch.setattr(metrics, "_waited", lambda _: clock[0])
    held.order = order
    return {r.name: r for r in metrics.hold(None, "", repeat=len(runs), messages=[])}


def test_the_request_that_waited_least_for_a_core_is_held(monkeypatch):
    rows = held(monkeypatch, (0.304, 0.2, 4, 0.05), (0.204, 0.2, 4, 0.001), (0.104, 0.3, 4, 0.02))
    assert rows["TTFT - HTTP"].difference == pytest.approx(2) and rows["TTFT - HTTP"].agrees
    assert rows["TTFT - HTTP"].servers == pytest.approx(200) and rows["HTTP alone"].ours == pytest.approx(2)
    assert rows["waited for a core"].ours == pytest.approx(1)
    assert not held(monkeypatch, (0.3, 0.2, 4, 0.001), (0.2, 0.2, 4, 0.002))["TTFT - HTTP"].agrees


def test_nothing_comes_between_the_refusals_and_the_request(monkeypatch):
    held(monkeypatch, (0.104, 0.1, 4, 0))
    assert held.order == ["metrics", "refusals", "request", "metrics"] * 2


def test_tokens_must_agree_each_time(monkeypatch):
    rows = held(monkeypatch, (0.1, 0.1, 4, 0), (0.1, 0.1, 5, 1), (0.1, 0.1, 4, 2))
    assert not rows["completion tokens"].agrees and rows["prompt tokens"].agrees


def test_round_trip_is_the_time_of_a_refusal():
    slow = error(404, "The model `qrecipe-no-such-model` does not exist.")
    slow.pieces[0] = (0.02, slow.pieces[0][1])
    with replay(*[slow] * 3) as (url, seen):
        seconds = round_trip(OpenAI(base_url=url, api_key="none"), **ASK, max_tokens=5, repeat=3)
    assert 0.02 <= seconds < 0.2 and len(seen) == 3
    assert seen[0]["messages"] == ASK["messages"] and seen[0]["stream"] and seen[0]["max_tokens"] == 5


def test_several_tokens_a_step_are_compared_by_step():
    rows = {
        r.name: r
        for r in compare(ours(tokens=(1, 3, 2, 2)), difference(Snapshot({}), after(generation_tokens_total=8)))
    }
    assert rows["ITL, mean"].agrees and rows["completion tokens"].agrees


def test_one_token_off_does_not_agree():
    rows = {r.name: r for r in compare(ours(), difference(Snapshot({}), after(generation_tokens_total=5)))}
    assert not rows["completion tokens"].agrees


def test_other_peoples_requests_spoil_the_comparison():
    with pytest.raises(RequestFailed, match="finished 2 requests"):
        compare(ours(), difference(Snapshot({}), after(2)))


def test_a_restart_in_between_is_seen():
    with pytest.raises(RequestFailed, match="restarted"):
        difference(after(5), after(1))


def test_servers_without_vllm_metrics_are_named():
    with replay() as (url, _), pytest.raises(RequestFailed, match="has no vLLM metrics"):
        read_metrics(url)
    with pytest.raises(RequestFailed, match="nothing answers"):
        read_metrics("http://127.0.0.1:9/v1")


def test_dissect_asks_no_metrics():
    with replay(Reply(CHAT)) as (url, seen):
        dissect(OpenAI(base_url=url, api_key="none"), **ASK)
    assert len(seen) == 1 and Path(seen[0]["path"]).name == "completions"
