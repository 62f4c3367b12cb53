"""The capacity law against vLLM's own allocator, called with the same layers (only where vllm can be imported)."""

import contextlib
import re
from types import SimpleNamespace

import pytest
from examples import examples
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from qrecipe.errors import BadInput
from qrecipe.pool import plan_pool, split_layers
from qrecipe.shape import ModelShape

pytest.importorskip("vllm.v1.core.kv_cache_utils")
import torch  # noqa: E402
from vllm.distributed.utils import get_pp_indices  # noqa: E402
from vllm.model_executor.layers.mamba.mamba_utils import MambaStateShapeCalculator  # noqa: E402
from vllm.platforms.interface import Platform  # noqa: E402
from vllm.v1.core.kv_cache_utils import get_kv_cache_capacity, get_kv_cache_configs  # noqa: E402
from vllm.v1.kv_cache_interface import FullAttentionSpec, MambaSpec, SlidingWindowSpec  # noqa: E402

KV = {1: torch.uint8, 2: torch.bfloat16}


def config_for(pool_args: dict, length: int) -> SimpleNamespace:
    """The parts of a VllmConfig that the allocator reads."""
    pp = pool_args["pipeline_parallel_size"]
    return SimpleNamespace(
        model_config=SimpleNamespace(
            max_model_len=length, original_max_model_len=length, dtype=torch.bfloat16, use_mla=False, architecture="x"
        ),
        cache_config=SimpleNamespace(
            num_gpu_blocks_override=None,
            mamba_cache_mode="align" if pool_args["prefix_caching"] else "none",
            block_size=pool_args["block_size"] or 16,
            mamba_block_size=None,
            user_specified_mamba_block_size=False,
            mamba_page_size_padded=None,
            cache_dtype="auto",
        ),
        parallel_config=SimpleNamespace(decode_context_parallel_size=1),
        kv_transfer_config=None,
        scheduler_config=SimpleNamespace(disable_hybrid_kv_cache_manager=False),
        max_in_flight_tokens=pool_args["max_num_batched_tokens"] * (pp if pp > 1 else 2),
        speculative_config=None,
    )


def vllm_specs(shape: ModelShape, args: dict, config: SimpleNamespace, monkeypatch) -> list[dict]:
    """One dict of layer specs a pipeline stage, with the hybrid block size from vLLM's own alignment code."""
    tp, spec, kv = (
        args["tensor_parallel_size"],
        args["speculative_tokens"],
        KV[2 if args["kv_cache_dtype"] == "auto" else 1],
    )
    heads = max(1, shape.kv_heads // tp)
    if shape.hybrid:
        state_dtype = getattr(torch, shape.state_dtype or "bfloat16")
        shapes = MambaStateShapeCalculator.gated_delta_net_state_shape(
            tp, shape.gdn_k_heads, shape.gdn_v_heads, shape.gdn_k_dim, shape.gdn_v_dim, shape.conv_kernel, spec
        )
        model = SimpleNamespace(
            get_mamba_state_shape_from_config=lambda c: shapes,
            get_mamba_state_dtype_from_config=lambda c: (torch.bfloat16, state_dtype),
        )
        config.cache_config.cache_dtype = "auto" if kv is torch.bfloat16 else "fp8"
        config.model_config.get_num_kv_heads = lambda p: heads
        config.model_config.get_head_size = lambda: shape.head_dim
        monkeypatch.setattr("vllm.model_executor.models.ModelRegistry.resolve_model_cls", lambda *a, **k: (model, None))
        monkeypatch.setattr("vllm.config.vllm.set_current_vllm_config", lambda c: contextlib.nullcontext())
        Platform._align_hybrid_block_size(
            config, SimpleNamespace(get_supported_kernel_block_sizes=lambda: [16, 32, 64])
        )
    block = config.cache_config.block_size
    full = FullAttentionSpec(block_size=block, num_kv_heads=heads, head_size=shape.head_dim, dtype=kv)
    kinds = {"full": full}
    if "sliding" in shape.layers:
        kinds["sliding"] = SlidingWindowSpec(
            block_size=block, num_kv_heads=heads, head_size=shape.head_dim, dtype=kv, sliding_window=shape.window
        )
    if shape.hybrid:
        kinds["gdn"] = MambaSpec(
            block_size=block,
            shapes=shapes,
            dtypes=(torch.bfloat16, state_dtype),
            page_size_padded=config.cache_config.mamba_page_size_padded,
            mamba_cache_mode=config.cache_config.mamba_cache_mode,
            num_speculative_blocks=spec,
        )
    pp, stages = args["pipeline_parallel_size"], []
    for rank in range(pp):
        first, last = get_pp_indices(len(shape.layers), rank, pp)
        stages.append({f"layer.{i}": kinds[shape.layers[i]] for i in range(first, last)})
    if spec:
        stages[-1]["mtp.0"] = full
    return stages


@st.composite
def cases(draw):
    tp = draw(st.sampled_from([1, 2, 4, 8]))
    kv_heads = draw(st.sampled_from([1, 2, 4, 8]))
    kind = draw(st.sampled_from(["dense", "hybrid", "sliding", "sliding only"]))
    n = draw(st.integers(2, 40))
    pattern = {
        "dense": ["full"],
        "hybrid": draw(st.sampled_from([["gdn"] * 3 + ["full"], ["gdn", "full"], ["gdn", "full", "full"]])),
        "sliding": draw(st.sampled_from([["sliding"] * 5 + ["full"], ["sliding", "full"]])),
        "sliding only": ["sliding"],
    }[kind]
    layers = tuple((pattern * n)[:n])
    shape = ModelShape(
        "x",
        "qwen3_5",
        layers,
        heads=8 * kv_heads,
        kv_heads=kv_heads,
        head_dim=draw(st.sampled_from([64, 128, 256])),
        mtp_layers=1,
        window=draw(st.sampled_from([128, 512, 1024, 4096])),
        gdn_k_heads=16,
        gdn_v_heads=draw(st.sampled_from([16, 32, 48])),
        gdn_k_dim=128,
        gdn_v_dim=128,
        conv_kernel=4,
        state_dtype=draw(st.sampled_from(["float32", "bfloat16"])),
    )
    args = {
        "kv_cache_dtype": draw(st.sampled_from(["auto", "fp8"])),
        "prefix_caching": draw(st.booleans()),
        "block_size": draw(st.sampled_from([None, 16, 32, 64])),
        "speculative_tokens": draw(st.sampled_from([0, 0, 1, 3])) if kind == "hybrid" else 0,
        "tensor_parallel_size": tp,
        "pipeline_parallel_size": draw(st.sampled_from([1, 1, 2, 3, 4])),
        "max_num_batched_tokens": draw(st.sampled_from([512, 2048, 8192])),
    }
    return shape, args, draw(st.integers(1, 300_000)), draw(st.integers(10**6, 10**11))


@settings(max_examples=examples(400), deadline=None, suppress_health_check=list(HealthCheck))
@given(case=cases())
def test_blocks_tokens_and_estimates_equal_vllms(case):
    shape, args, length, available = case
    try:
        pool = plan_pool(shape, **args)
    except BadInput:
        assume(False)
    config = config_for(args, length)
    with pytest.MonkeyPatch.context() as monkeypatch:
        stages = vllm_specs(shape, args, config, monkeypatch)
    assert pool.block_tokens == config.cache_config.block_size
    try:
        made = get_kv_cache_configs(config, stages, [available] * len(stages))
    except ValueError as e:
        assert pool.need(length) > pool.blocks(available)
        said = re.search(r"estimated maximum model length is (\d+)", str(e))
        alone = [
            pool.longest([available if i == s else 1e18 for i in range(len(stages))], length)
            for s in range(len(stages))
        ]
        assert (int(said[1]) if said else 0) in alone  # vLLM names the first stage that refuses
        assert pool.longest(available, length) == min(alone)
        return
    assert pool.need(length) <= pool.blocks(available)
    blocks = pool.blocks(available)
    assert blocks == made[0].num_blocks
    tokens, concurrency = get_kv_cache_capacity(config, made[0])
    assert pool.concurrency(blocks, length) == pytest.approx(concurrency)
    assert pool.tokens(blocks, length) == tokens


@settings(max_examples=examples(100), deadline=None)
@given(layers=st.integers(1, 100), pp=st.integers(1, 16))
def test_layers_are_split_over_stages_as_vllm_does(layers, pp):
    assume(pp <= layers)
    assert [(r.start, r.stop) for r in split_layers(layers, pp)] == [get_pp_indices(layers, i, pp) for i in range(pp)]
