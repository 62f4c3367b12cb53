"""The log reader on real logs, on every wording known, and on broken ones. Figures name the log they come from."""

import gzip
import json
import random
import re
from pathlib import Path

import pytest
from examples import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from qrecipe.errors import BadInput
from qrecipe.log_source import RECORDED, recorded
from qrecipe.startup_log import JSON_KEYS, StageWatcher, read_all, read_log

DATA = Path(__file__).parent / "data" / "logs"
H200 = recorded("qwen3.5-4b-32768.log")
PUBLIC = [json.loads(line) for line in (DATA / "public-startups.jsonl").read_text().splitlines()]
H200_FIGURES = {
    "vllm_version": "0.27.0", "weights_gib": 8.61, "load_seconds": 0.967372, "consumed_gib": 9.23,
    "activation_gib": 4.13, "cuda_graph_estimate_gib": 0.5, "cuda_graph_gib": 0.66, "available_kv_gib": 112.46,
    "kv_cache_tokens": 3464967, "max_model_len": 32768, "max_concurrency": 105.74, "attention_block_tokens": 528,
    "init_seconds": 254.02, "compile_seconds": 44.15,
}  # fmt: skip


def figures(log):
    return {k: getattr(log, k) for k in JSON_KEYS}


def test_the_h200_log_gives_every_figure():
    log = read_log(H200)
    assert figures(log) == H200_FIGURES
    assert log.ready and log.failure is None
    assert log.architecture == "Qwen3_5ForConditionalGeneration"
    assert log.backends["attention"] == "FLASH_ATTN" and log.backends["GDN prefill"] == "Triton/FLA"
    assert log.flags["gpu_memory_utilization"] == 0.9 and log.config["quantization"] is None
    assert (log.total_gib, log.free_gib, log.mamba_padding_pct, log.mm_warmup_seconds) == (139.8, 139.29, 0.76, 28.383)
    assert [name for name, _ in log.stages] == "import config load compile profile graphs warmup ready".split()
    seconds = [s for _, s in log.stages]
    assert seconds == sorted(seconds) and seconds[-1] == 371
    assert log.ranks[0]["rank"] == "EngineCore" and len(log.ranks) == 1


def test_the_4090d_excerpt_lacks_what_it_lacks():
    log = read_log(recorded("4090d"))
    assert (log.weights_gib, log.available_kv_gib, log.kv_cache_tokens, log.init_seconds) == (
        8.61,
        10.21,
        235706,
        286.39,
    )
    assert log.vllm_version == "0.23.0" and log.weights_read_seconds == 2.35
    assert log.consumed_gib is None and log.max_concurrency is None and log.attention_block_tokens is None
    assert log.runtime[0] | {"seconds": 0} == {
        "seconds": 0, "prompt_tps": 0.9, "generation_tps": 6.3, "running": 1, "waiting": 0, "kv_usage_pct": 0.6,
        "prefix_hit_pct": None, "mm_hit_pct": None,
    }  # fmt: skip


def test_the_cpu_log():
    log = read_log(recorded("cpu-"))
    assert log.ready and log.weights_gib is None and log.activation_gib is None
    assert (log.available_kv_gib, log.kv_cache_tokens, log.max_concurrency, log.attention_block_tokens) == (
        1.0,
        798720,
        195.0,
        384,
    )
    assert log.backends["attention"] == "CPU_ATTN" and len(log.runtime) == 2


def test_an_eager_start_has_no_graph_estimate():
    log = read_log(DATA / "h200-vllm0.27.0-qwen3.5-4b-32768-util0.20-eager.log")
    assert (log.activation_gib, log.cuda_graph_estimate_gib, log.available_kv_gib) == (3.63, None, 15.26)
    assert "compile" not in [name for name, _ in log.stages]


def test_a_second_start_finds_its_compiled_code():
    log = read_log(recorded("seqs256"))
    assert log.compile_cached is True and log.compile_seconds == 4.35
    assert read_log(H200).compile_cached is False
    assert log.failure is None, "errors of a wanted shutdown are no failure"
    assert len(log.runtime) > 5 and max(r["generation_tps"] for r in log.runtime) > 100


@pytest.mark.parametrize("name, words", [("util0.20-fails", "max_num_seqs (1024)"), ("util0.07", "No available memory"), ("262144", "estimated maximum model length is 107712")])  # fmt: skip
def test_failing_logs_keep_their_cause_line(name, words):
    log = read_log(recorded(name))
    assert not log.ready
    assert any(e.startswith("ValueError: ") and words in e for e in log.errors)
    assert not any("ulimit" in e for e in log.errors)


@pytest.mark.parametrize("case", PUBLIC, ids=lambda c: c["case"])
def test_every_public_wording(case):
    log = read_log(case["raw"])
    raw = "\n".join(case["raw"])
    for key, name in [("weights_gib", "model_loading_gib"), ("available_kv_gib", "available_kv_gib"), ("kv_cache_tokens", "gpu_kv_cache_tokens"), ("max_concurrency", "max_concurrency"), ("attention_block_tokens", "attention_block_size")]:  # fmt: skip
        said = case[name]
        if said is None or (f"{said:,}" not in raw and str(said) not in raw and key != "kv_cache_tokens"):
            continue
        if case["case"] == "h29" and key in ("available_kv_gib", "kv_cache_tokens"):
            continue  # the public excerpt itself is cut within these two lines
        assert getattr(log, key) == said, key


WORDINGS = [json.loads(line) for line in (DATA / "public-wordings.jsonl").read_text(encoding="utf-8").splitlines()]


@pytest.mark.parametrize("case", WORDINGS, ids=lambda c: c["case"])
def test_more_public_wordings_and_collectors(case):
    log = read_log(case["raw"])
    for key, value in case["want"].items():
        if key == "fail":
            assert value in log.failure["text"]
        else:
            assert (len(log.ranks) if key == "ranks" else getattr(log, key)) == value, key


OLD = """INFO 11-20 10:00:00 model_runner.py:1077] Loading model weights took 14.9888 GB
INFO 11-20 10:00:09 worker.py:232] Memory profiling takes 0.98 seconds
INFO 11-20 10:00:09 worker.py:232] the current vLLM instance can use total_gpu_memory (23.58GiB) x gpu_memory_utilization (0.90) = 21.22GiB
INFO 11-20 10:00:09 worker.py:232] model weights take 14.99GiB; non_torch_memory takes 0.09GiB; PyTorch activation peak memory takes 1.21GiB; the rest of the memory reserved for KV Cache is 4.93GiB.
INFO 11-20 10:00:09 executor_base.py:110] # cuda blocks: 2524, # CPU blocks: 2048
INFO 11-20 10:00:09 executor_base.py:115] Maximum concurrency for 8192 tokens per request: 4.93x
INFO 11-20 10:00:35 model_runner.py:1518] Graph capturing finished in 17 secs, took 0.26 GiB
INFO 11-20 10:00:35 llm_engine.py:431] init engine (profile, create kv cache, warmup model) took 26.71 seconds
""".splitlines()  # the V0 engine's wording


def test_the_old_engine_counts_blocks():
    log = read_log(OLD)
    assert log.kv_cache_tokens == 2524 * 16 and log.gpu_blocks == 2524
    assert (log.weights_gib, log.non_torch_gib, log.activation_gib, log.available_kv_gib) == (14.9888, 0.09, 1.21, 4.93)
    assert (log.total_gib, log.requested_gib, log.cuda_graph_gib, log.init_seconds) == (23.58, 21.22, 0.26, 26.71)
    assert read_log(OLD[4:5]).kv_cache_tokens is None, "blocks alone do not fix the block size"


def dressed(lines, how):
    text = "\n".join(lines)
    if how == "none":
        text = re.sub(r"(?m)^.*?(?:\.py:\d+\]|\)) ", "", text)
    elif how == "coloured":
        text = re.sub(r"(?m)^\(([^)]*)\)", "\x1b[0;36m(\\1)\x1b[0;0m", text)
        text = re.sub(r"(\d+\.\d+) GiB", "\x1b[1;36m\\1\x1b[0m GiB", text)
    elif how == "colour codes without escape":
        text = re.sub(r"(?m)^\(([^)]*)\)", "[0;36m(\\1)[0;0m", text)
    elif how == "json":
        text = "\n".join(
            json.dumps({"log": "\x1b[36m" + line + "\x1b[0m\n", "stream": "stderr", "time": "2026-11-30T07:09:00.1Z"})
            for line in lines
        )
    elif how == "logfmt":
        text = "\n".join("ts=2026-11-30T07:09:00Z level=info msg=" + json.dumps(line) for line in lines)
    elif how == "compose":
        text = "\n".join("vllm-1  | " + line for line in lines)
    elif how == "kubernetes":
        text = "\n".join("2026-11-30T07:09:00.123456789Z stderr F " + line for line in lines)
    elif how == "crlf":
        text = "\r\n".join(lines)
    elif how == "soft wrap":
        import textwrap

        text = "\n".join("\n".join(textwrap.wrap(line, 80, break_on_hyphens=False) or [""]) for line in lines)
    elif how == "soft wrap with prefix":
        import textwrap

        text = "\n".join(
            "\n".join("vllm-1  | " + p for p in textwrap.wrap(line, 70, break_on_hyphens=False) or [""])
            for line in lines
        )
    return text


DRESSES = ["plain", "none", "coloured", "colour codes without escape", "json", "logfmt", "compose", "kubernetes", "crlf", "soft wrap", "soft wrap with prefix"]  # fmt: skip


@pytest.mark.parametrize("how", DRESSES)
def test_any_prefix(how, tmp_path):
    lines = [line for line in H200.read_text().splitlines() if "Capturing" not in line]
    path = tmp_path / "server.log"
    path.write_bytes(dressed(lines, how).encode())
    log = read_log(path)
    assert figures(log) == H200_FIGURES, how
    assert log.ready


def test_gzip_truncation_and_utf16(tmp_path):
    data = H200.read_bytes()
    packed = gzip.compress(data)
    (tmp_path / "a.gz").write_bytes(packed)
    (tmp_path / "cut.gz").write_bytes(packed[: len(packed) * 2 // 3])
    (tmp_path / "wide.log").write_bytes(data.decode().encode("utf-16"))
    assert figures(read_log(tmp_path / "a.gz")) == H200_FIGURES
    assert figures(read_log(tmp_path / "wide.log")) == H200_FIGURES
    assert read_log(tmp_path / "cut.gz").weights_gib == 8.61
    cut = data[: data.index(b"GPU KV cache size") + 30]
    assert read_log(cut.decode().splitlines()).kv_cache_tokens is None or not read_log(cut.decode().splitlines()).ready


def test_the_tightest_rank_rules():
    lines = []
    for rank, free in [(0, 11.3), (1, 10.9), (2, 11.1)]:
        for words in [
            f"Model loading took {4.1 + rank / 100:.2f} GiB memory and 3.0 seconds",
            f"Available KV cache memory: {free} GiB",
        ]:
            lines.append(f"(Worker_TP{rank} pid={70 + rank}) INFO 11-30 07:09:0{rank} [gpu_worker.py:563] {words}")
    random.Random(1).shuffle(lines)
    lines.append("(EngineCore pid=7) INFO 11-30 07:09:09 [kv_cache_utils.py:2235] GPU KV cache size: 235,706 tokens")
    log = read_log(lines)
    assert (log.available_kv_gib, log.weights_gib, len(log.ranks)) == (10.9, 4.11, 3)
    bare = read_log([re.sub(r"^.*?\] ", "", line) for line in lines])
    assert bare.available_kv_gib == 10.9 and len(bare.ranks) == 3


def test_several_starts_in_one_file(tmp_path):
    path = tmp_path / "all.log"
    failing = recorded("util0.20-fails").read_text()
    path.write_text(failing + H200.read_text() + recorded("seqs256").read_text() + failing)
    starts = read_all(path)
    assert [s.available_kv_gib for s in starts] == [14.6, 112.46, 16.8, 14.6]
    assert [s.ready for s in starts] == [False, True, True, False]
    last = read_log(path)
    assert last.available_kv_gib == 14.6 and not last.ready and last.flags == starts[-1].flags
    path.write_text(failing + H200.read_text())
    assert figures(read_log(path)) == H200_FIGURES and read_log(path).errors == []


def test_a_long_run_keeps_few_rows(tmp_path):
    path = tmp_path / "run.log"
    metric = next(x for x in recorded("cpu-").read_text().splitlines(True) if "Avg prompt" in x)
    path.write_text(H200.read_text() + metric * 50000)
    log = read_log(path)
    assert 900 < len(log.runtime) <= 2000 and figures(log) == H200_FIGURES


@pytest.mark.parametrize(
    "name, data, words",
    [("empty.log", b"", "empty"), ("picture.png", b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR", "binary"), ("notes.txt", b"Dear diary, nothing here.\n", "no line of a vLLM log"), ("bad.gz", b"\x1f\x8b\x08rubbish", "damaged")],
)  # fmt: skip
def test_what_is_no_log_is_refused_in_one_sentence(tmp_path, name, data, words):
    path = tmp_path / name
    path.write_bytes(data)
    with pytest.raises(BadInput, match=words) as caught:
        read_log(path)
    assert "\n" not in str(caught.value)


def test_missing_and_folder(tmp_path):
    for path in (tmp_path / "none.log", tmp_path, "nul\0byte"):
        with pytest.raises(BadInput):
            read_log(path)


def test_the_stage_watcher_follows_a_live_start():
    watcher, seen = StageWatcher(), []
    for line in H200.read_text().splitlines():
        seen += [s for s in [watcher.feed(line)] if s]
    assert seen == "config load compile profile graphs warmup ready".split()
    assert watcher.feed("(APIServer) Resolved architecture: X") is None, "stages never go back"


REAL = [p.read_bytes() for p in sorted(RECORDED.glob("*.log"))]
PIECES = [w for w in ("Model loading took", "GiB", "KV cache size:", "Maximum concurrency for", "tokens per request:", "blocks: ", "version ", "non-default args: {", "args: Namespace(", "LLM engine (v", "with config", "Error", "\x1b[36m", "\\n", "11-31 25:61:61", "99999999999999999999", "-", ",", "1e309", "{", "'a': [", "\0", "é")]  # fmt: skip


@st.composite
def mutated(draw):
    data = bytearray(draw(st.sampled_from(REAL)))
    at = draw(st.integers(0, len(data) - 1))
    data = data[at : at + draw(st.integers(1, 6000))]
    for _ in range(draw(st.integers(0, 8))):
        where = draw(st.integers(0, max(0, len(data) - 1)))
        what = draw(st.one_of(st.binary(max_size=8), st.sampled_from(PIECES).map(str.encode)))
        data[where : where + draw(st.integers(0, 12))] = what
    return bytes(data)


@settings(max_examples=examples(300), deadline=None)
@given(
    st.one_of(
        mutated(),
        st.binary(max_size=2000),
        st.lists(st.sampled_from(PIECES), max_size=60).map(lambda p: " ".join(p).encode()),
    )
)
def test_no_log_makes_it_raise(data):
    for log in read_all(data.split(b"\n")):
        json.dumps({k: v for k, v in figures(log).items()}, allow_nan=False)
        assert len(log.errors) <= 80


def test_the_log_of_a_benchmark_is_no_server_s():
    with pytest.raises(BadInput, match="the log of `vllm bench`, not of a server"):
        read_log(Path(__file__).parent.parent / "gallery/h200/08_benchmark-c2.log")


def test_two_processes_that_write_at_once_are_told_apart(tmp_path):
    log = tmp_path / "x.log"
    kv = "INFO 12-01 03:16:37 [cpu_worker.py:248] Explicitly set (1.0/23.54) GiB for KV cache on node 0.\n"
    tokens = "INFO 12-01 03:16:37 [kv_cache_utils.py:2235] GPU KV cache size: 1,005,130 tokens\n"
    one, two = (f"(EngineCore_DP{n} pid={11396 + n}) " for n in (0, 1))
    log.write_text(f"{one}{two}{kv}{kv}{one}{tokens}{two}{tokens}")
    found = read_log(log)
    assert sorted(r["rank"] for r in found.ranks) == ["EngineCore_DP0", "EngineCore_DP1"]
    assert {r["available_kv_gib"] for r in found.ranks} == {1.0}
