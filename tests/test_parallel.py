"""One model on two ranks and as two copies, on the real engine: `make parallel` (about ten minutes on two cores)."""

import json
import os
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from conftest import wait_until
from openai import APIError, OpenAI

from qrecipe.pool import plan_pool
from qrecipe.shape import load_shape
from qrecipe.startup_log import read_log
from qrecipe.teaching_model.answers import ANSWERS

WANTED = os.environ.get("QRECIPE_PARALLEL") == "all"
pytestmark = [pytest.mark.engine, pytest.mark.skipif(not WANTED, reason="minutes: make parallel")]
RANKS = {"tensor": ["Worker_TP0", "Worker_TP1"], "data": ["EngineCore_DP0", "EngineCore_DP1"]}


@pytest.fixture(scope="module", params=RANKS)
def served(engine, request):
    """(which kind, the server's state) of a server on two ranks; afterwards nothing of it is left."""
    flag, port = f"--{request.param}-parallel-size", engine.port
    done = engine.run("qrecipe.cli", "serve", "--engine", "cpu", "--port", port, flag, 2, "--keep", timeout=900)
    assert done.returncode == 0, done.stderr
    yield request.param, state(engine)
    engine.run("qrecipe.cli", "stop", "--port", port)
    assert engine.clean()


def state(engine) -> dict:
    return json.loads(engine.run("qrecipe.cli", "status", "--port", engine.port, "--json").stdout)[0]


def client(engine) -> OpenAI:
    return OpenAI(base_url=f"http://127.0.0.1:{engine.port}/v1", api_key="EMPTY", max_retries=0)


def ask(engine, question: str, thinking: bool) -> str:
    reply = client(engine).chat.completions.create(
        model="qwen3.5-4b", temperature=0, max_tokens=600, messages=[{"role": "user", "content": question}],
        extra_body={"chat_template_kwargs": {"enable_thinking": thinking}},
    )  # fmt: skip
    return reply.choices[0].message.content.strip()


def test_every_answer_is_the_one_of_one_rank_word_for_word(engine, served):
    with ThreadPoolExecutor(8) as pool:
        said = dict(zip(ANSWERS, pool.map(lambda key: ask(engine, *key), ANSWERS), strict=True))
    assert said == {key: content for key, (_, content) in ANSWERS.items()}


def test_copies_share_the_requests(engine, served):
    kind, _ = served
    metrics = httpx.get(f"http://127.0.0.1:{engine.port}/metrics").text
    counts = {}
    for name, count in re.findall(r'vllm:request_success_total\{engine="(\d)".*?\} ([\d.]+)', metrics):
        counts[name] = counts.get(name, 0) + float(count)
    assert len(counts) == (2 if kind == "data" else 1) and min(counts.values()) >= 8


def test_each_rank_is_in_the_log_and_its_tokens_were_predicted(engine, served):
    kind, facts = served
    log = read_log(Path(facts["log"]))
    assert sorted(rank["rank"] for rank in log.ranks) == RANKS[kind] and log.ready
    (model,) = (engine.state / "models").iterdir()
    shape = load_shape(model)
    pool = plan_pool(shape, block_size=128, tensor_parallel_size=2 if kind == "tensor" else 1)
    blocks = pool.blocks([log.available_kv_gib * 2**30])
    assert log.attention_block_tokens == pool.block_tokens
    assert log.kv_cache_tokens == int(blocks / pool.need(log.max_model_len) * log.max_model_len)


def test_a_rank_killed_under_load_is_named_and_nothing_is_left(engine, served):
    kind, facts = served
    name = "VLLM::Worker_TP1" if kind == "tensor" else "VLLM::EngineCore_DP1"
    (victim,) = [
        p
        for p in engine.processes()
        if p.cmdline()[:1] == [name] or p.name() == name[:15] and name in " ".join(p.cmdline())
    ]
    stream = client(engine).chat.completions.create(
        model="qwen3.5-4b", messages=[{"role": "user", "content": "go on"}], max_tokens=20000, temperature=1.0,
        stream=True, extra_body={"ignore_eos": True},
    )  # fmt: skip
    got = [next(iter(stream)) for _ in range(5)]
    victim.kill()
    try:
        got += list(stream)
    except (APIError, httpx.HTTPError):
        pass
    assert len(got) >= 5  # what had arrived is kept
    assert wait_until(lambda: state(engine)["status"] in ("died", "failed"), 120), state(engine)
    assert str(victim.pid) in state(engine)["why"] or name.split("::")[1] in state(engine)["why"], state(engine)
    assert engine.clean()
