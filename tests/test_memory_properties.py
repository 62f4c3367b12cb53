"""The budget over random settings: more context never needs less, more memory never gives less, and no setting raises.

QRECIPE_EXAMPLES=10000 runs that many examples of each.
"""

from examples import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from qrecipe import memory
from qrecipe.errors import RecipeError
from qrecipe.memory import budget
from qrecipe.shape import load_shape

SHAPES = st.sampled_from(
    [
        "Qwen3.5-0.8B",
        "Qwen3.5-4B",
        "Qwen3.5-27B",
        "Qwen3.5-35B-A3B",
        "Qwen3-Next-80B-A3B",
        "Qwen3-8B",
        "gemma-3-4b",
        "Llama-3.1-70B",
    ]
)


@settings(max_examples=examples(300), deadline=None)
@given(
    name=SHAPES,
    a=st.integers(1, 300_000),
    b=st.integers(1, 300_000),
    gib=st.floats(0, 200),
    fp8=st.booleans(),
    prefix=st.booleans(),
    version=st.sampled_from(["0.27.0", "0.18.0"]),
)
def test_more_context_never_needs_less(name, a, b, gib, fp8, prefix, version):
    low, high = sorted((a, b))
    flags = {
        "kv_cache_dtype": "fp8" if fp8 else "auto",
        "prefix_caching": prefix,
        "available_kv_gib": gib,
        "vllm_version": version,
    }
    short, long = budget(name, **flags, max_model_len=low), budget(name, **flags, max_model_len=high)
    assert short.blocks_per_request <= long.blocks_per_request
    assert short.max_concurrency >= long.max_concurrency
    assert short.fits or not long.fits
    best = short.pool.longest(gib * 2**30, 300_000)
    assert best == 0 or short.pool.need(best) <= short.pool.blocks(gib * 2**30)
    assert short.pool.need(best + 1) > short.pool.blocks(gib * 2**30) or best == 300_000


@settings(max_examples=examples(200), deadline=None)
@given(
    name=SHAPES, gib=st.floats(4, 200), u=st.floats(0.05, 0.9), seqs=st.integers(1, 2048), tokens=st.integers(16, 32768)
)
def test_more_memory_never_gives_less(name, gib, u, seqs, tokens):
    flags = {"max_model_len": 8192, "max_num_seqs": seqs, "max_num_batched_tokens": tokens}
    base = budget(name, gpu_memory_gib=gib, gpu_memory_utilization=u, **flags)
    assert (
        budget(name, gpu_memory_gib=gib, gpu_memory_utilization=u + 0.05, **flags).available_kv_gib
        > base.available_kv_gib
    )
    assert (
        budget(name, gpu_memory_gib=gib + 1, gpu_memory_utilization=u, **flags).available_kv_gib
        >= base.available_kv_gib - 0.17
    )  # 70 GiB: other non-torch
    more = budget(name, gpu_memory_gib=gib, gpu_memory_utilization=u, **flags | {"max_num_seqs": seqs + 1})
    assert more.non_torch_gib + more.activation_gib >= base.non_torch_gib + base.activation_gib - 1e-9
    assert (
        budget(name, gpu_memory_gib=gib, gpu_memory_utilization=u, **flags, language_model_only=True).available_kv_gib
        >= base.available_kv_gib
    )
    assert base.as_dict()["fits"] in (True, False)


@settings(max_examples=examples(300), deadline=None)
@given(
    st.dictionaries(
        st.sampled_from(
            sorted(memory.Flags.__dataclass_fields__) + ["gpu", "gpu_memory_gib", "available_kv_gib", "calibrate"]
        ),
        st.one_of(
            st.none(),
            st.integers(-5, 10**9),
            st.floats(),
            st.text(max_size=8),
            st.booleans(),
            st.just("fp8"),
            st.lists(st.integers(), max_size=2),
        ),
    )
)
def test_any_setting_gives_a_budget_or_a_sentence(settings_):
    try:
        budget(load_shape("Qwen3.5-4B"), **settings_).as_dict()
    except RecipeError as e:
        assert len(str(e)) > 10
