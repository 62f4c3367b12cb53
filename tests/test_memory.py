"""The budget: logged figures reproduced, levers in the right direction, bad input refused by name."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from qrecipe import memory, teaching_model
from qrecipe.cards import cards, find_card, parse_size
from qrecipe.errors import BadInput, NotCovered
from qrecipe.memory import JSON_KEYS, budget
from qrecipe.scale_out import plans
from qrecipe.shape import SHAPES as SHAPE_FILES

sys.path.insert(0, str(Path(__file__).parent.parent / "benchmarks"))
from prediction import compare_start, starts  # noqa: E402

H200 = {"gpu_memory_gib": 139.8, "max_model_len": 32768, "vllm_version": "0.27.0"}
KNOWN = [s for s in starts() if not s.inferred]


@pytest.mark.parametrize("start", KNOWN, ids=lambda s: s.case)
def test_the_law_is_exact_where_all_inputs_are_known(start):
    rows = [r for r in compare_start(start) if r.exact is not None]
    assert all(r.exact for r in rows), rows


@pytest.mark.parametrize("start", [s for s in starts() if not s.quantized], ids=lambda s: s.case)
def test_weights_are_within_one_percent(start):
    for row in compare_start(start):
        if row.figure == "weights" and row.predicted is not None:
            assert abs(row.error_percent) < 1, row


@pytest.mark.parametrize("start", [s for s in starts() if s.shape.name == "Qwen3.5-4B"], ids=lambda s: s.case)
def test_the_4bs_pool_is_within_three_percent_from_card_and_flags(start):
    for row in compare_start(start):
        if row.figure.startswith("available") and row.predicted is not None:
            assert abs(row.error_percent) < 3, row


def test_the_loading_line_of_the_4b_by_its_parts():
    found = budget("Qwen3.5-4B", **H200)
    assert found.weights.raw / 2**30 == pytest.approx(8.455, abs=0.001)
    assert found.weights.rotary / 2**30 == 0.125
    assert found.weights.rounding / 2**30 == pytest.approx(0.033, abs=0.001)
    assert f"{found.weights_gib:.2f}" == "8.61"
    for flags in ({"language_model_only": True}, {"limit_mm_per_prompt": '{"image": 0, "video": 0}'}):
        assert f"{budget('Qwen3.5-4B', **H200, **flags).weights_gib:.2f}" == "7.99"
    half = budget("Qwen3.5-4B", **H200, limit_mm_per_prompt={"image": 0})
    assert f"{half.weights_gib:.2f}" == "8.61" and "saves no weights" in " ".join(half.advice)


def test_the_pool_of_the_4b_by_its_parts():
    # CAPACITY: state 2,146,304 B, 4,096 B a token, block 528, padding 0.76 %
    found = budget("Qwen3.5-4B", **H200, available_kv_gib=112.46)
    assert (found.pool.state_bytes, found.pool.token_bytes) == (2_146_304, 4096)
    assert (found.attention_block_tokens, found.page_bytes, found.pool_block_bytes) == (528, 2_162_688, 8 * 2_162_688)
    assert f"{found.pool.padding_percent:.2f}" == "0.76"
    assert (found.blocks_per_request, found.kv_cache_tokens) == (66, 3_464_967)
    assert f"{found.max_concurrency:.2f}" == "105.74"


def test_the_cpu_engines_block_and_pool():
    # cpu-vllm0.27.0-tiny-qwen3.5-4096.log: block 384, padding 46.56 %, 1 GiB → 798,720 tokens, 195.00x
    found = budget(teaching_model.config(), available_kv_gib=1.0, block_size=128, max_model_len=4096)
    assert found.attention_block_tokens == 384 and f"{found.pool.padding_percent:.2f}" == "46.56"
    assert found.kv_cache_tokens == 798_720 and f"{found.max_concurrency:.2f}" == "195.00"


def test_both_token_lines_by_version():
    new = budget("Qwen3.5-4B", available_kv_gib=10.21, max_model_len=4096, vllm_version="0.21.0")
    old = budget("Qwen3.5-4B", available_kv_gib=10.21, max_model_len=4096, vllm_version="0.20.0")
    assert new.kv_cache_tokens == 235_706
    assert old.kv_cache_tokens == new.blocks // 4 * 528


def test_a_default_that_cannot_start_is_warned_of_and_its_mend_starts():
    # the log of this start has 906 blocks
    flags = H200 | {"gpu_memory_utilization": 0.20}
    found = budget("Qwen3.5-4B", **flags)
    seqs = int(re.search(r"--max-num-seqs (\d+) fits", found.advice[0])[1])
    assert found.fits is False and abs(seqs - 906) < 5
    assert budget("Qwen3.5-4B", **flags, max_num_seqs=seqs).fits
    assert budget("Qwen3.5-4B", **flags, enforce_eager=True).fits


def test_the_advice_for_a_context_that_does_not_fit_starts():
    flags = H200 | {"max_model_len": 262_144, "gpu_memory_utilization": 0.12}
    found = budget("Qwen3.5-4B", **flags)
    words = found.advice[0].split()
    length, seqs = int(words[words.index("--max-model-len") + 1]), int(words[words.index("--max-num-seqs") + 1])
    assert budget("Qwen3.5-4B", **flags | {"max_model_len": length}, max_num_seqs=seqs).fits
    assert found.pool.need(length + 1) > found.pool.blocks(found.available_kv_gib * 2**30)


def test_vllms_own_estimated_length():
    assert memory.longest_of(budget("Qwen3.5-4B", available_kv_gib=3.35)) == 107_712


def test_the_peak_of_every_eager_start_is_its_largest_phase():
    for start in starts():
        if start.flags.get("enforce_eager") and "activation_gib" in start.logged:
            (peak,) = (r for r in compare_start(start) if r.figure == "peak activation")
            assert abs(peak.error_percent) < 0.5, (start.case, peak)


def test_a_batch_of_two_pictures_is_one_run_of_the_encoder():
    # 3.66 GiB logged: H200, 0.27.0
    two = budget("Qwen3.5-4B", **H200, max_num_seqs=256, max_num_batched_tokens=32768, enforce_eager=True)
    assert "2 × the largest picture" in two.how["activation_gib"] and two.activation_gib == pytest.approx(
        3.66, rel=0.01
    )


def test_what_the_buffers_keep_of_the_allocators_segments():
    # the account of PyTorch's allocator after the profile: 262 + 224 MiB kept, 0.88 GiB beside the weights with 32,768 tokens
    flags = {"max_num_seqs": 256, "max_num_batched_tokens": 32768, "language_model_only": True}
    found = budget("Qwen3.5-4B", **H200, **flags, enforce_eager=True)
    assert found.non_torch_gib == pytest.approx(0.88, abs=0.02) and "kept segments" in found.how["non_torch_gib"]
    assert budget("Qwen3.5-4B", **H200, **flags).non_torch_gib < found.non_torch_gib


def test_activation_holds_the_graph_estimate_from_0_21_on():
    new, old = (budget("Qwen3.5-4B", **H200 | {"vllm_version": v}) for v in ("0.21.0", "0.20.0"))
    eager = budget("Qwen3.5-4B", **H200, enforce_eager=True)
    assert new.activation_gib == pytest.approx(old.activation_gib + new.cuda_graph_estimate_gib)
    assert eager.activation_gib == pytest.approx(old.activation_gib) and eager.cuda_graph_gib == 0


def test_parts_add_up_to_the_card():
    found = budget("Qwen3.5-4B", gpu="H200", gpu_memory_utilization=0.9, max_model_len=32768)
    labels = [p[0] for p in found.parts()]
    assert labels == ["weights", "non-torch", "activation", "CUDA graphs", "KV pool", "left free"]
    assert sum(p[1] for p in found.parts()) == pytest.approx(139.8)


def test_the_json_has_exactly_its_keys_and_null_where_nothing_is_given():
    found = budget("Qwen3.5-4B", max_model_len=32768).as_dict()
    assert tuple(found) == JSON_KEYS
    assert found["weights_gib"] == 8.61 and found["attention_block_tokens"] == 528 and found["blocks_per_request"] == 66
    for key in (
        "non_torch_gib",
        "activation_gib",
        "available_kv_gib",
        "blocks",
        "kv_cache_tokens",
        "max_concurrency",
        "fits",
    ):
        assert found[key] is None
    full = budget("Qwen3.5-4B", gpu="A10", max_model_len=32768).as_dict()
    for key in JSON_KEYS:
        assert full[key] is not None
        assert key in full["how"] or key in ("fits", "advice", "how")


def test_quantization_names_what_stays():
    plain, four = budget("Qwen3.5-4B", gpu="A10"), budget("Qwen3.5-4B", gpu="A10", quantization="awq")
    assert four.weights_gib < plain.weights_gib - 4
    for part in ("embedding", "vision"):
        assert part in four.how["weights_gib"].split("unquantized")[1]


@pytest.mark.parametrize(
    "name, flags, logged",
    [("Qwen3.5-4B", {}, 5.45), ("Qwen3.5-4B", {"language_model_only": True}, 5.12), ("Qwen3.5-9B", {}, 10.81)],
)
def test_weights_put_into_fp8_while_they_load(name, flags, logged):
    # H200, 0.27.0, --quantization fp8
    assert budget(name, **H200, quantization="fp8", **flags).weights_gib == pytest.approx(logged, rel=0.005)


def test_two_checkpoints_of_one_shape_are_told_apart():
    config = json.loads((SHAPE_FILES / "Qwen3.5-4B.json").read_text())

    def loaded(quant):
        return budget(config | {"quantization_config": quant}, max_model_len=8192).weights

    four = {"quant_method": "compressed-tensors", "config_groups": {"g": {"weights": {"num_bits": 4, "type": "int"}}}}
    eight = {
        "quant_method": "compressed-tensors",
        "config_groups": {"g": {"weights": {"num_bits": 8, "type": "float"}}},
    }
    assert (loaded(four).method, loaded(eight).method) == ("gptq", "fp8")
    assert loaded({"quant_method": "gptq", "bits": 8}).method == "int8"
    spared = loaded(four | {"ignore": ["lm_head", "re:.*linear_attn.*", "re:["]})
    assert spared.gib > loaded(four).gib + 1 and "gdn in_proj_qkvz" in spared.unquantized


def test_the_batch_defaults_follow_the_flags_given():
    # arg_utils.py of vLLM 0.27.0: tokens ≤ sequences × length, sequences ≤ tokens
    few = budget("Qwen3.5-4B", **H200 | {"max_model_len": 1024}, max_num_seqs=4)
    assert few.max_num_batched_tokens == 4096
    assert budget("Qwen3.5-4B", **H200, max_num_batched_tokens=128).max_num_seqs == 128
    more = budget("Qwen3.5-4B", **H200, max_num_seqs=2048, max_num_batched_tokens=512)
    assert more.fits is False and "--max-num-seqs 512 fits" in more.advice[0]


def test_every_assumption_is_shown():
    assumed = budget("Qwen3.5-4B", gpu="RTX 4090", vllm_version="0.23.0").how["fits"]
    for words in (
        "max_model_len 262144",
        "gpu_memory_utilization 0.92",
        "max_num_seqs 256",
        "max_num_batched_tokens 2048",
        "prefix_caching False",
        "max_split_size_mb 20",
    ):
        assert words in assumed
    given = {"max_num_seqs": 64, "max_num_batched_tokens": 2048, "gpu_memory_utilization": 0.9, "prefix_caching": False}
    assert budget("Qwen3.5-4B", **H200, **given).how["fits"] == "assumed: nothing"


@pytest.mark.parametrize(
    "name",
    [
        "max_model_len",
        "gpu_memory_utilization",
        "max_num_seqs",
        "available_kv_gib",
        "gpu_memory_gib",
        "speculative_tokens",
        "block_size",
    ],
)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), -(10**5), 10**30, "x", True, []])
def test_what_is_no_number_is_refused_by_name(name, value):
    with pytest.raises(BadInput, match=name.removesuffix("_gib")):
        budget("Qwen3.5-4B", **{name: value})


@pytest.mark.parametrize("version", ["banana", "1", "27", ""])
def test_a_version_that_is_none_is_refused(version):
    with pytest.raises(BadInput, match="vllm_version"):
        budget("Qwen3.5-4B", vllm_version=version)


def test_a_35b_in_nvfp4_is_within_its_band():
    # h09 in startups.jsonl: 21.86 GiB, vLLM 0.20.0
    found = budget("Qwen3.5-35B-A3B", quantization="nvfp4", vllm_version="0.20.0")
    assert abs(found.weights_gib - 21.86) < found.band_gib["weights_gib"]


def test_draft_layers_count_only_with_speculation():
    plain, spec = budget("Qwen3.5-4B", gpu="H200"), budget("Qwen3.5-4B", gpu="H200", speculative_tokens=2)
    assert spec.parameters - plain.parameters == pytest.approx(0.1206e9, rel=1e-2)
    assert spec.pool.state_bytes - plain.pool.state_bytes == 2 * 8192 * 2
    with pytest.raises(BadInput, match="speculative"):
        budget("Qwen3-8B", speculative_tokens=2)


def test_the_tightest_pipeline_stage_governs():
    two = budget("Qwen3.5-27B", gpu="L40S", pipeline_parallel_size=2, max_model_len=32768)
    assert two.available_kv_gib == min(two.stages_gib) and len(two.stages_gib) == 2
    assert two.blocks == two.pool.blocks([x * 2**30 for x in two.stages_gib])


def test_heads_are_copied_once_there_are_more_ranks_than_heads():
    four, eight = (budget("Qwen3.5-4B", tensor_parallel_size=n) for n in (4, 8))
    assert four.pool.token_bytes == eight.pool.token_bytes == 1024


def test_calibration_reproduces_its_own_start_and_narrows_the_band():
    log = "tests/data/logs/h200-vllm0.27.0-qwen3.5-4b-32768-util0.20-eager.log"
    flags = {"gpu_memory_gib": 139.8, "max_model_len": 32768, "gpu_memory_utilization": 0.2, "enforce_eager": True}
    plain, learned = budget("Qwen3.5-4B", **flags), budget("Qwen3.5-4B", **flags, calibrate=log)
    assert learned.available_kv_gib == pytest.approx(15.26, abs=0.011)
    assert learned.activation_gib == pytest.approx(3.63, abs=0.001) and learned.weights_gib == pytest.approx(8.61)
    assert learned.band_gib["available_kv_gib"] < plain.band_gib["available_kv_gib"]


def test_answers():
    smallest, *_ = plans("Qwen3.5-4B", cards=cards(), most=1, max_model_len=32768)
    assert smallest.card.name == "T4"
    assert plans("Qwen3.5-397B-A17B", cards=cards(), most=1, max_model_len=32768) == []
    bought = memory.levers("Qwen3.5-4B", gpu="A10", gpu_memory_utilization=0.9, max_model_len=32768)
    assert [x.tokens for x in bought] == sorted((x.tokens for x in bought), reverse=True)
    text_only = next(x for x in bought if x.flag == "--language-model-only")
    assert text_only.kv_gib > 0.6


@pytest.mark.parametrize(
    "change, words",
    [
        ({"gpu": "H300"}, "nearest"),
        ({"gpu_memory_gib": "24 apples"}, "24GB"),
        ({"gpu_memory_gib": 24000}, "more than any card has; .* 24000MiB .23.4 GiB"),
        ({"gpu_memory_utilization": 1.5}, "gpu_memory_utilization"),
        ({"gpu_memory_utilization": True}, "gpu_memory_utilization"),
        ({"max_model_len": 0}, "max_model_len"),
        ({"max_model_len": -5}, "max_model_len"),
        ({"tensor_parallel_size": 3}, "does not divide"),
        ({"tensor_parallel_size": 0}, "tensor_parallel_size"),
        ({"pipeline_parallel_size": 99}, "layers"),
        ({"kv_cache_dtype": "fp3"}, "kv_cache_dtype"),
        ({"dtype": "int7"}, "dtype"),
        ({"block_size": 17}, "16"),
        ({"mamba_ssm_cache_dtype": "x"}, "mamba"),
        ({"limit_mm_per_prompt": "{"}, "limit_mm"),
        ({"limit_mm_per_prompt": "[]"}, "limit_mm"),
        ({"speculative_tokens": -1}, "speculative"),
        ({"nodes": 3}, "nodes"),
        ({"no_such_flag": 1}, "no_such_flag"),
        ({"available_kv_gib": "x"}, "available_kv"),
        ({"max_num_seqs": 2.5}, "max_num_seqs"),
    ],
)
def test_bad_input_is_named(change, words):
    with pytest.raises(BadInput, match=words):
        budget("Qwen3.5-4B", **change)


def test_an_unknown_quantization_is_not_covered():
    with pytest.raises(NotCovered, match="awq"):
        budget("Qwen3.5-4B", quantization="gguf")


def test_sizes_with_units():
    assert parse_size(24) == parse_size("24") == parse_size("24GiB") == parse_size("24576 MiB") == 24
    assert parse_size("24GB") == pytest.approx(24e9 / 2**30)
    for bad in ("", "GB", "-1", "0", "1e9", None, "24 XB"):
        with pytest.raises(BadInput):
            parse_size(bad)


def test_every_card_has_a_source_and_less_than_its_label():
    assert len(cards()) >= 20 and {c.nominal_gb for c in cards()} >= {8, 12, 16, 24, 32, 40, 48, 80, 96, 141, 180, 192}
    for card in cards():
        assert card.source and card.memory_gib < card.nominal_gb * 1.01
    assert find_card("NVIDIA A10").nvidia_smi_mib == 23_028 and find_card("h200").memory_gib == 139.8
    assert find_card("NVIDIA A100-SXM4-80GB").name == "A100 80GB"


def test_neither_torch_nor_vllm_is_loaded():
    code = "import sys; from qrecipe.memory import budget, levers; budget('Qwen3.5-4B', gpu='A10'); assert not {'torch', 'vllm', 'transformers', 'pandas', 'numpy'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_a_card_without_bfloat16_is_told_how_to_start():
    def told(**flags):
        return [a for a in budget("Qwen3.5-4B", max_model_len=8192, **flags).advice if "--dtype half" in a]

    assert told(gpu="T4") == ["the T4 has no bfloat16 and vLLM refuses it there: add --dtype half"]
    assert told(gpu="V100 32GB") and not told(gpu="T4", dtype="float16") and not told(gpu="RTX 4090")
