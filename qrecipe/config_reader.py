"""config.json → ModelShape: which field means what in each family, what is assumed, what is refused.

A field that is absent falls to the default of the family's configuration class and is listed in `ModelShape.assumed`;
a field that is present but "unknown" stays unknown, and whatever needs it says so. Nothing is assumed silently.
"""

from __future__ import annotations

from typing import Any

from qrecipe.errors import BadInput, NotCovered
from qrecipe.shape import ModelShape, Vision

COVERED = "Qwen3.5, Qwen3.6, Qwen3-Next, Qwen3, Qwen3-MoE, Qwen2, Llama and Gemma 3 (decoder-only, without MLA)"
GDN_FAMILIES = ("qwen3_5", "qwen3_5_moe", "qwen3_next")
FAMILIES = (*GDN_FAMILIES, "qwen3", "qwen3_moe", "qwen2", "llama", "gemma3")
KINDS = {"linear_attention": "gdn", "full_attention": "full", "sliding_attention": "sliding"}
GEMMA3 = {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "vocab_size": 262_208, "max_position_embeddings": 131_072, "sliding_window": 4096}
REFUSED = {
    "kv_lora_rank": "multi-head latent attention (MLA)",
    "ssm_state_size": "Mamba layers", "mamba_d_state": "Mamba layers",
    "global_head_dim": "attention layers of two head sizes",
    "num_local_experts": "this kind of mixture of experts",
}


class _Fields:
    """The fields of one config: missing ones are named, defaults are written down."""

    def __init__(self, config: dict, name: str):
        self.config, self.name, self.assumed = config, name, []

    def get(self, key: str) -> Any:
        value = self.config.get(key)
        return None if value == "unknown" else value

    def number(self, key: str, default: int | None = None, why: str = "", lowest: int = 1) -> int | None:
        """A whole number ≥ lowest; `default` (written down) where the key is absent, None where it is "unknown"."""
        value = self.config.get(key)
        if value is None and default is not None:
            self.assumed.append(f"{key} is absent: {default} assumed{' (' + why + ')' if why else ''}")
            return default
        if value is None or value == "unknown":
            return None
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not lowest <= value <= 10**9 or value != int(value):
            raise BadInput(f"{self.name}: {key} is {value!r}; a whole number from {lowest} is expected")
        return int(value)

    def real(self, holder: dict, key: str, default: float) -> float:
        """A positive number from `holder`, or the default where it is absent or "unknown"."""
        value = holder.get(key)
        if value in (None, "unknown"):
            return default
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < 1e9:
            raise BadInput(f"{self.name}: {key} is {value!r}; a positive number is expected")
        return float(value)

    def need(self, key: str) -> int:
        value = self.number(key)
        if value is None:
            raise BadInput(f"{self.name}: {key} is missing in the config; the memory cannot be computed without it")
        return value


def read_config(config: dict, name: str = "config") -> ModelShape:
    """A config dict (text-only or a multimodal wrapper with `text_config`) as a ModelShape.

    Raises BadInput for missing or contradictory fields, NotCovered (naming what is covered) for other architectures.
    """
    text = config.get("text_config", config)
    if not isinstance(text, dict):
        raise BadInput(f"{name}: text_config is a {type(text).__name__}, an object is expected")
    family = str(text.get("model_type") or config.get("model_type") or "").removesuffix("_text")
    quant = config.get("quantization_config") or text.get("quantization_config") or {}
    method = quant.get("quant_method") if isinstance(quant, dict) else None
    if config.get("is_encoder_decoder") or text.get("is_encoder_decoder"):
        raise NotCovered(f"{name}: encoder-decoder models are not covered; covered are {COVERED}")
    for key, what in REFUSED.items():
        if text.get(key):
            raise NotCovered(f"{name}: {what} ({key}) is not covered; covered are {COVERED}")
    if method == "mxfp4":
        raise NotCovered(f"{name}: MXFP4 checkpoints are not covered; covered are {COVERED}")
    if family not in FAMILIES:
        raise NotCovered(f"{name}: model_type {family or 'missing'!r} is not covered; covered are {COVERED}")
    if family == "gemma3":  # its published configs leave these to the class
        absent = {k: v for k, v in GEMMA3.items() if text.get(k) is None}
        text = text | absent
    f = _Fields(text, name)
    if family == "gemma3":
        f.assumed += [f"{k} is absent: {v} assumed (the default of gemma3)" for k, v in absent.items()]
    heads, layers = f.need("num_attention_heads"), f.need("num_hidden_layers")
    hidden = f.number("hidden_size")
    kv_heads = f.number("num_key_value_heads", heads, "as many as attention heads")
    if kv_heads is None or heads % kv_heads:
        raise BadInput(f"{name}: num_attention_heads {heads} is no multiple of num_key_value_heads {kv_heads}")
    if text.get("head_dim") is None and family in ("llama", "qwen2") and hidden:
        head_dim = hidden // heads
        if hidden % heads:
            raise BadInput(f"{name}: hidden_size {hidden} is not divisible by num_attention_heads {heads} and head_dim is missing")
    else:
        head_dim = f.need("head_dim")
    tie = config.get("tie_word_embeddings", text.get("tie_word_embeddings"))
    if tie is None:
        tie = family == "gemma3"
        f.assumed.append(f"tie_word_embeddings is absent: {tie} assumed (the default of {family})")
    elif text is not config and text.get("tie_word_embeddings", tie) not in (tie, "unknown"):
        f.assumed.append(f"tie_word_embeddings: the wrapper says {tie}, text_config {not tie}; the wrapper's is taken")
    positions = f.number("max_position_embeddings")
    moe = family in ("qwen3_moe", "qwen3_next", "qwen3_5_moe")
    shape = {
        "name": name, "family": family, "layers": _kinds(f, family, layers), "heads": heads, "kv_heads": kv_heads,
        "head_dim": head_dim, "hidden": hidden, "intermediate": f.number("intermediate_size"), "vocab": f.number("vocab_size"),
        "tied": None if tie == "unknown" else bool(tie), "max_position": positions, "dtype": _dtype(config, text, f),
        "attention_bias": bool(f.get("attention_bias")) or family == "qwen2",
        "output_bias": bool(f.get("attention_bias")) and family != "qwen2", "mlp_bias": bool(f.get("mlp_bias")),
        "gated": family in GDN_FAMILIES and f.config.get("attn_output_gate", True) is not False,
        "quantization": method, "quant_config": quant if isinstance(quant, dict) else {},
        "kv_scheme": _kv_scheme(quant), "mtp_layers": f.number("mtp_num_hidden_layers", lowest=0) or 0,
    }
    if "sliding" in shape["layers"]:
        shape["window"] = f.number("sliding_window")
    if family in GDN_FAMILIES:
        for ours, theirs in (("gdn_k_heads", "linear_num_key_heads"), ("gdn_v_heads", "linear_num_value_heads"),
                             ("gdn_k_dim", "linear_key_head_dim"), ("gdn_v_dim", "linear_value_head_dim"), ("conv_kernel", "linear_conv_kernel_dim")):
            shape[ours] = f.need(theirs)
        shape["state_dtype"] = _state_dtype(f, family)
    if moe:
        every, dense = f.number("decoder_sparse_step") or 1, f.get("mlp_only_layers") or []
        if not isinstance(dense, list):
            raise BadInput(f"{name}: mlp_only_layers is {dense!r}; a list of layer numbers is expected")
        shape |= {"experts": f.need("num_experts"), "moe_intermediate": f.number("moe_intermediate_size") or f.need("moe_intermediate_size"),
                  "shared_intermediate": f.number("shared_expert_intermediate_size", lowest=0) or 0 if family != "qwen3_moe" else 0,
                  "experts_per_token": f.number("num_experts_per_tok") or 0,
                  "moe_layers": tuple(i for i in range(layers) if i not in dense and (i + 1) % every == 0)}
    shape |= _rotary(f, text, family, head_dim, positions)
    if isinstance(config.get("vision_config"), dict):
        shape |= {"has_vision": True, "vision": _vision(config, name, family, hidden, f)}
    return ModelShape(**shape, assumed=tuple(f.assumed))


def _kinds(f: _Fields, family: str, layers: int) -> tuple[str, ...]:
    types, every = f.get("layer_types"), None
    if types is not None:
        if not isinstance(types, list) or not all(isinstance(t, str) for t in types):
            raise BadInput(f"{f.name}: layer_types is {str(types)[:40]!r}; a list of names is expected")
        if len(types) != layers:
            raise BadInput(f"{f.name}: layer_types names {len(types)} layers, num_hidden_layers says {layers}")
        if unknown := set(types) - set(KINDS):
            raise NotCovered(f"{f.name}: layer type {', '.join(sorted(map(str, unknown)))} is not covered; covered are {', '.join(KINDS)}")
        return tuple(KINDS[t] for t in types)
    if family in GDN_FAMILIES:
        every, other = f.number("full_attention_interval", 4, f"the default of {family}"), "gdn"
    elif family == "gemma3":
        every, other = f.number("sliding_window_pattern", 6, "the default of gemma3"), "sliding"
    elif f.get("use_sliding_window") and f.get("sliding_window"):
        raise NotCovered(f"{f.name}: use_sliding_window without layer_types is not covered; name the layers in layer_types")
    if every is None:
        return ("full",) * layers
    return tuple("full" if (i + 1) % every == 0 else other for i in range(layers))


def _dtype(config: dict, text: dict, f: _Fields) -> str:
    found = next((c[k] for c in (text, config) for k in ("dtype", "torch_dtype") if c.get(k) not in (None, "unknown")), None)
    if found is None:
        f.assumed.append("dtype is absent: bfloat16 assumed")
        return "bfloat16"
    found = str(found).removeprefix("torch.")
    return "bfloat16" if found == "float32" else found  # vLLM's "auto" serves float32 checkpoints in 16 bits


def _state_dtype(f: _Fields, family: str) -> str | None:
    if f.config.get("mamba_ssm_dtype") == "unknown" or (family != "qwen3_next" and not f.config.get("mamba_ssm_dtype")):
        f.assumed.append("mamba_ssm_dtype is not in the source: float32 assumed (as in the family's other sizes)")
        return "float32"
    return f.get("mamba_ssm_dtype")


def _kv_scheme(quant: dict) -> str | None:
    scheme = quant.get("kv_cache_scheme") if isinstance(quant, dict) else None
    return "fp8" if isinstance(scheme, dict) and scheme.get("num_bits") == 8 and scheme.get("type") == "float" else None


def _rotary(f: _Fields, text: dict, family: str, head_dim: int, positions: int | None) -> dict:
    """Size of the cos/sin caches: rows × rotary_dim. mRoPE keeps four times the maximum position; linear and YaRN scaling
    keep it times their factor; Gemma 3 has one cache for full and one for sliding layers."""
    rope = f.get("rope_parameters") or f.get("rope_scaling") or {}
    rope = rope if isinstance(rope, dict) else {}
    inner = rope["full_attention"] if isinstance(rope.get("full_attention"), dict) else rope
    partial = f.real(text, "partial_rotary_factor", f.real(inner, "partial_rotary_factor", 0.25 if family in GDN_FAMILIES else 1.0))
    kind, factor, rows = inner.get("rope_type") or inner.get("type"), f.real(inner, "factor", 1.0), positions or 0
    if kind == "linear":
        rows = int(rows * factor)
    elif kind == "yarn":
        rows = int(f.real(inner, "original_max_position_embeddings", float(rows)) * factor)
    if "mrope_section" in inner or (family in ("qwen3_5", "qwen3_5_moe") and text.get("rope_parameters") == "unknown"):
        rows *= 4
    return {"rotary_dim": int(head_dim * partial), "rotary_positions": rows + (positions or 0 if family == "gemma3" else 0)}


def _vision(config: dict, name: str, family: str, hidden: int | None, f: _Fields) -> Vision | None:
    v = _Fields(config["vision_config"], f"{name} vision_config")
    if family == "gemma3":
        depth, patch, side = v.number("num_hidden_layers"), v.number("patch_size"), v.number("image_size")
        sizes = (depth, v.number("hidden_size"), v.number("intermediate_size"), v.number("num_attention_heads"), patch)
        if None in sizes or side is None:
            return None
        return Vision("siglip", *sizes, positions=(side // patch) ** 2, out=hidden or 0)
    sizes = (v.number("depth"), v.number("hidden_size"), v.number("intermediate_size"), v.number("num_heads"), v.number("patch_size", 16, "as in the family"))
    positions = v.number("num_position_embeddings", 2304, "as in the family")
    if None in sizes or positions is None:
        return None
    out = v.number("out_hidden_size", hidden, "the text model's hidden_size")
    if out and hidden and out != hidden:
        raise BadInput(f"{name}: vision out_hidden_size {out} is not the text model's hidden_size {hidden}")
    f.assumed += v.assumed
    return Vision("qwen", *sizes, positions=positions, channels=v.number("in_channels") or 3, temporal=v.number("temporal_patch_size") or 2,
                  merge=v.number("spatial_merge_size") or 2, out=out or hidden or 0, deepstack=len(v.get("deepstack_visual_indexes") or ()))
