"""The levers of chapter 08: recorded figures against their logs, the recipes, and the reader of decode steps."""

import json
import sys
from pathlib import Path

import pytest

from qrecipe.recipe import recipe_for
from qrecipe.startup_log import read_log

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "benchmarks"))
import decode_step  # noqa: E402
import tuning  # noqa: E402

BENCH, LOGS = ROOT / "qrecipe/data/bench", ROOT / "tests/data/tuning"
ROWS = {r["lever"]: r for r in map(json.loads, (BENCH / "h200-tuning.jsonl").read_text().splitlines())}
FILES = {
    "plain": "plain",
    "fp8 weights": "fp8-weights",
    "fp8 KV cache": "fp8-kv-cache",
    "text only": "text-only",
    "MTP, 1 token": "mtp-1-token",
    "fp8 weights, text only, tuned for one": "fp8-weights-text-only-tuned-for-one",
}


@pytest.mark.parametrize("lever", FILES)
def test_recorded_memory_is_that_of_the_logs(lever):
    log = read_log(LOGS / f"h200-vllm0.27.0-qwen3.5-4b-{FILES[lever]}.log")
    assert log.ready and log.vllm_version == "0.27.0"
    assert (ROWS[lever]["weights_gib"], ROWS[lever]["kv_cache_tokens"]) == (log.weights_gib, log.kv_cache_tokens)


def test_every_recorded_lever_is_one_that_the_benchmark_pulls():
    assert set(ROWS) == set(FILES) < set(tuning.LEVERS)
    assert all(
        r["weights"] == "dummy" and r["versions"]["torch"] == "2.11.0" and "driver" in r["device"]
        for r in ROWS.values()
    )


def test_one_lever_at_a_time(tmp_path, monkeypatch):
    monkeypatch.setenv("QRECIPE_STATE", str(tmp_path))
    plain = recipe_for("gpu", "Qwen/Qwen3.5-4B")
    same = tuning.pulled(plain, "plain").argv()
    for lever in list(tuning.LEVERS)[1:6]:
        words = tuning.pulled(plain, lever).argv()
        assert [w for w in same if w not in words] == [] and 1 <= len(words) - len(same) <= 2, lever
    assert "VLLM_CACHE_ROOT" in tuning.pulled(plain, "text only").env


def test_a_step_is_split_by_kind_and_gaps_are_what_no_kernel_covers(tmp_path):
    """Twelve steps of 100 µs: a matrix of 60, an attention of 20, a norm of 5; 15 without a kernel."""
    events, kinds = [], [("nvjet_gemm", 60.0), ("flash_fwd", 20.0), ("triton_norm", 5.0)]
    for step in range(12):
        at = 100.0 * step
        for name, duration in kinds:
            events.append({"cat": "kernel", "name": name, "ts": at, "dur": duration})
            at += duration
        events.append({"cat": "cpu_op", "name": "ignored", "ts": at, "dur": 1000.0})
    trace = tmp_path / "trace.json"
    trace.write_text(json.dumps({"traceEvents": events}))
    found = decode_step.account(decode_step.steps_of(decode_step.kernels_of(trace)))
    assert found["ms_a_step"] == pytest.approx(0.1) and found["kernels_a_step"] == 3
    kinds = {k: ms for k, ms in found["ms_by_kind"].items() if ms}
    assert kinds == {"matrix × vector": 0.06, "attention": 0.02, "norms, gates and copies": 0.005}
    assert found["ms_of_gaps"] == pytest.approx(0.015)
