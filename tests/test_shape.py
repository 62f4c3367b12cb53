"""Shapes: parameters by part are exact against transformers on the meta device; what is not covered is refused."""

import json
import re

import pytest
from examples import examples
from hub_server import Hub
from hypothesis import given, settings
from hypothesis import strategies as st

from qrecipe.config_reader import read_config
from qrecipe.errors import BadInput, NotCovered, RecipeError
from qrecipe.shape import SHAPES, bundled_shapes, load_shape

GDN = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "linear_conv_kernel_dim": 4,
}
SMALL = {
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 512,
    "intermediate_size": 96,
    "max_position_embeddings": 1024,
    "dtype": "bfloat16",
}
MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "shared_expert_intermediate_size": 40}
VISION = {
    "depth": 2,
    "hidden_size": 64,
    "intermediate_size": 80,
    "num_heads": 4,
    "patch_size": 16,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "num_position_embeddings": 64,
    "out_hidden_size": 64,
    "in_channels": 3,
}
SIGLIP = {
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "image_size": 56,
    "patch_size": 14,
    "model_type": "siglip_vision_model",
    "vision_use_head": False,
}
FAMILIES = {
    "qwen3": {**SMALL, "model_type": "qwen3", "tie_word_embeddings": False},
    "qwen3 tied": {**SMALL, "model_type": "qwen3", "tie_word_embeddings": True},
    "qwen2": {k: v for k, v in SMALL.items() if k != "head_dim"}
    | {"model_type": "qwen2", "tie_word_embeddings": False},
    "llama": {k: v for k, v in SMALL.items() if k != "head_dim"}
    | {"model_type": "llama", "tie_word_embeddings": False},
    "llama with biases": {
        **SMALL,
        "model_type": "llama",
        "attention_bias": True,
        "mlp_bias": True,
        "tie_word_embeddings": True,
    },
    "qwen3 moe": {**SMALL, **MOE, "model_type": "qwen3_moe", "decoder_sparse_step": 2, "tie_word_embeddings": False},
    "qwen3 next": {**SMALL, **GDN, **MOE, "model_type": "qwen3_next", "tie_word_embeddings": False},
    "qwen3.5 text": {**SMALL, **GDN, "model_type": "qwen3_5_text", "tie_word_embeddings": True},
    "qwen3.5": {
        "model_type": "qwen3_5",
        "tie_word_embeddings": True,
        "text_config": {**SMALL, **GDN, "model_type": "qwen3_5_text"},
        "vision_config": VISION,
    },
    "qwen3.5 moe": {
        "model_type": "qwen3_5_moe",
        "tie_word_embeddings": False,
        "text_config": {**SMALL, **GDN, **MOE, "model_type": "qwen3_5_moe_text"},
        "vision_config": VISION,
    },
    "gemma3 text": {**SMALL, "model_type": "gemma3_text", "sliding_window": 64},
    "gemma3": {
        "model_type": "gemma3",
        "text_config": {**SMALL, "model_type": "gemma3_text", "sliding_window": 64},
        "vision_config": SIGLIP,
        "mm_tokens_per_image": 4,
    },
}
FULL = [
    n
    for n in bundled_shapes()
    if n.split("-")[0] in ("Qwen3.5", "Qwen3", "Llama", "gemma") and not n.startswith("gemma-4")
]


PARTS = [
    ("visual|vision|multi_modal", "vision"), ("lm_head", "lm_head"), ("embed_tokens", "embedding"),
    ("linear_attn", "gdn"), ("self_attn", "attention"), ("norm", "norms"),
]  # fmt: skip  # words in the name of a parameter, the first that are there


def by_part(model) -> dict[str, int]:
    """Parameters of a transformers model by part, shared tensors once."""
    parts, seen = {}, set()
    for name, p in model.named_parameters():
        if id(p) in seen:
            continue
        seen.add(id(p))
        part = next((part for words, part in PARTS if re.search(words, name)), "mlp")
        parts[part] = parts.get(part, 0) + p.numel()
    return parts


def on_meta(config: dict):
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    made = transformers.AutoConfig.for_model(**config)
    kind = transformers.AutoModelForImageTextToText if "vision_config" in config else transformers.AutoModelForCausalLM
    with torch.device("meta"):
        model = kind.from_config(made)
    model.tie_weights()
    return model


def ours(shape) -> dict[str, int]:
    parts = {k: v for k, v in shape.parameters().items() if k != "mtp" and v}
    parts["mlp"] = parts.get("mlp", 0) + parts.pop("experts", 0)
    return parts


@pytest.mark.parametrize("family", FAMILIES)
def test_small_shapes_are_exact_by_part(family):
    assert ours(read_config(FAMILIES[family])) == by_part(on_meta(FAMILIES[family]))


@pytest.mark.parametrize("name", FULL)
def test_full_shapes_are_exact_by_part(name):
    config = json.loads((SHAPES / f"{name}.json").read_text())
    text = config.get("text_config", config)
    unknown = [k for c in (config, text, config.get("vision_config", {})) for k, v in c.items() if v == "unknown"]
    for c in (config, text):
        for key in [k for k, v in c.items() if v == "unknown" or k.startswith("_")]:
            del c[key]
    shape = load_shape(name)
    if "vision_config" in config and shape.vision is None:
        config = text
    want = by_part(on_meta(config))
    got = {k: v for k, v in ours(shape).items() if k in want}
    assert got == want, unknown


def test_the_4b_by_its_known_counts():
    shape = load_shape("Qwen/Qwen3.5-4B")
    assert shape.count(vision=False) == 4_205_751_296
    assert shape.count() == 4_539_265_536
    assert shape.count(mtp=True) == pytest.approx(4.66e9, rel=1e-3)
    assert shape.layers.count("gdn") == 24 and shape.layers.count("full") == 8 and shape.tied


def test_the_27b_checkpoint_size_is_its_count_with_mtp():
    # h22 in startups.jsonl: a checkpoint of 51.75 GiB in bfloat16
    assert load_shape("Qwen3.5-27B").count(mtp=True) * 2 / 2**30 == pytest.approx(51.75, abs=0.005)


def test_the_9b_checkpoint_size_is_its_count_with_mtp():
    # 19,306,216,416 B: bfloat16, with the GDN norm and A_log in float32
    shape = load_shape("Qwen3.5-9B")
    in_float32 = 24 * (shape.gdn_v_heads + shape.gdn_v_dim)
    assert 2 * (shape.count(mtp=True) + in_float32) == 19_306_216_416


def test_sources_of_a_shape(tmp_path):
    path = SHAPES / "Qwen3.5-4B.json"
    folder = tmp_path / "My-4B"
    folder.mkdir()
    (folder / "config.json").write_text(path.read_text())
    want = load_shape("Qwen3.5-4B")
    for source in (
        path,
        str(path),
        "qwen3.5-4b",
        "Qwen/Qwen3.5-4B",
        json.loads(path.read_text()),
        folder,
        str(folder / "config.json"),
    ):
        assert load_shape(source).parameters() == want.parameters()
    assert load_shape(folder).name == "My-4B"


@pytest.mark.parametrize(
    "change, words",
    [
        ({"kv_lora_rank": 512}, "MLA"),
        ({"is_encoder_decoder": True}, "encoder-decoder"),
        ({"model_type": "mamba2"}, "mamba2"),
        ({"quantization_config": {"quant_method": "mxfp4"}}, "MXFP4"),
        ({"layer_types": ["chunked_attention"] * 4}, "chunked_attention"),
    ],
)
def test_what_is_not_covered_is_refused_with_what_is(change, words):
    with pytest.raises(NotCovered, match=words) as e:
        read_config(FAMILIES["qwen3"] | change)
    assert "covered are" in str(e.value)


@pytest.mark.parametrize("name", ["DeepSeek-V3", "gpt-oss-20b", "gemma-4-26B-A4B"])
def test_bundled_shapes_outside_the_law_are_refused(name):
    with pytest.raises(NotCovered, match="Qwen3.5"):
        load_shape(name)


@pytest.mark.parametrize(
    "change, words",
    [
        ({"num_hidden_layers": None}, "num_hidden_layers"),
        ({"num_attention_heads": "unknown"}, "num_attention_heads"),
        ({"head_dim": None}, "head_dim"),
        ({"num_key_value_heads": 3}, "no multiple"),
        ({"layer_types": ["full_attention"] * 3}, "layer_types"),
        ({"hidden_size": -1}, "hidden_size"),
        ({"vocab_size": 1.5}, "vocab_size"),
        ({"num_hidden_layers": True}, "num_hidden_layers"),
    ],
)
def test_bad_fields_are_named(change, words):
    with pytest.raises(BadInput, match=words):
        read_config(FAMILIES["qwen3"] | change)


def test_an_assumption_is_listed_and_an_unknown_stays_unknown():
    config = {k: v for k, v in FAMILIES["qwen3"].items() if k not in ("tie_word_embeddings", "dtype")}
    assumed = " ".join(read_config(config).assumed)
    assert "tie_word_embeddings" in assumed and "dtype" in assumed
    shape = read_config(FAMILIES["qwen3"] | {"tie_word_embeddings": "unknown"})
    with pytest.raises(BadInput, match="tied"):
        shape.count()


@pytest.mark.parametrize("source", ["", "no-such-model", "/no/such/config.json", "./x", "a/b/c", "x\0y"])
def test_unknown_sources_are_refused_with_a_hint(source):
    with pytest.raises(BadInput, match="config.json|nearest"):
        load_shape(source)


def test_a_hub_id_is_read_from_the_cache_or_the_hub(tmp_path, monkeypatch):
    hub = Hub({"config.json": (SHAPES / "Qwen3.5-4B.json").read_bytes()}, model="Org/My-4B")
    monkeypatch.setenv("HF_ENDPOINT", hub.url)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    assert load_shape("Org/My-4B").count() == 4_539_265_536 and load_shape("Org/My-4B").name == "My-4B"
    kept = tmp_path / "models--Org--Mine" / "snapshots" / "x"
    kept.mkdir(parents=True)
    (kept / "config.json").write_bytes((SHAPES / "Qwen3-8B.json").read_bytes())
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert load_shape("Org/Mine").count() == load_shape("Qwen3-8B").count()
    with pytest.raises(BadInput, match="could not be fetched"):
        load_shape("Org/My-4B")
    hub.close()


@pytest.mark.parametrize("text", ["", "[]", "{", '"x"', "\x00\xff"])
def test_a_file_that_is_no_config(tmp_path, text):
    path = tmp_path / "config.json"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises((BadInput, NotCovered)):
        load_shape(path)


JUNK = st.one_of(
    st.none(),
    st.integers(-3, 10**6),
    st.floats(),
    st.text(max_size=5),
    st.booleans(),
    st.lists(st.integers(), max_size=3),
    st.just({}),
    st.just("unknown"),
    st.just({"factor": "x", "rope_type": "linear"}),
)
KEYS = sorted(
    {k for c in FAMILIES.values() for k in (*c, *c.get("text_config", {}))}
    | {
        "layer_types",
        "rope_parameters",
        "quantization_config",
        "rope_scaling",
        "mlp_only_layers",
        "partial_rotary_factor",
    }
)


@settings(max_examples=examples(1000), deadline=None)
@given(
    family=st.sampled_from(sorted(FAMILIES)),
    junk=st.dictionaries(st.sampled_from(KEYS), JUNK, max_size=3),
    inside=st.booleans(),
)
def test_a_mutated_config_gives_a_shape_or_a_sentence(family, junk, inside):
    config = dict(FAMILIES[family])
    if inside and "text_config" in config:
        config["text_config"] = config["text_config"] | junk
    else:
        config |= junk
    try:
        shape = read_config(config)
        shape.parameters()
    except RecipeError as e:
        assert len(str(e)) > 10
