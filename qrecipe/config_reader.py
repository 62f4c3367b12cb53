"""config.json → ModelShape: which field means what in each family, what is assumed, what is refused (data/families.json).

An absent field falls to the family's default and is listed in `ModelShape.assumed`; an "unknown" one stays unknown.
"""

import json
from pathlib import Path
from typing import Any

from qrecipe.checks import check_number
from qrecipe.errors import BadInput, NotCovered
from qrecipe.shape import ModelShape, Vision

TABLES = json.loads((Path(__file__).parent / "data" / "families.json").read_text(encoding="utf-8"))


class _Fields:
    """The fields of one config object: each is checked, a missing one is named, a default written down."""

    def __init__(self, config: dict, name: str, defaults: dict, assumed: list[str]):
        self.config, self.name, self.defaults, self.assumed = config, name, defaults, assumed

    def get(self, key: str, kind: type = object) -> Any:
        """The value of `kind`, else the default; None where it is "unknown", or absent without a default."""
        value = self.config.get(key)
        if value is None and self.defaults.get(key) is not None:
            value = self.defaults[key]
            self.assumed.append(f"{key} is absent: {value} assumed")
        if value is None or value == "unknown":
            return None
        if not isinstance(value, kind):
            raise BadInput(f"{self.name}: {key} is {str(value)[:40]!r}; a {kind.__name__} is expected")
        return value

    def number(self, key: str, low: float = 0, kind: type = int) -> Any:
        value = self.get(key)
        return None if value is None else check_number(value, f"{self.name}: {key}", low, 10**9, kind)

    def need(self, key: str) -> int:
        value = self.number(key, 1)
        if value is None:
            raise BadInput(f"{self.name}: {key} is missing in the config; the memory cannot be computed without it")
        return value

    def sizes(self, part: str) -> dict[str, int]:
        """The fields of ModelShape or Vision that the table lists for `part`, without those that are 0 or unknown."""
        table = TABLES["fields"][part]
        may = {ours: self.number(key) for ours, key in table.get("may", {}).items()}
        return {ours: self.need(key) for ours, key in table["need"].items()} | {k: v for k, v in may.items() if v}


def read_config(config: dict, name: str = "config") -> ModelShape:
    """A config dict (text-only or a multimodal wrapper with `text_config`) as a ModelShape. Raises BadInput for missing or
    contradictory fields, NotCovered (naming what is covered) for other architectures."""
    text, assumed = config.get("text_config", config), []
    if not isinstance(text, dict):
        raise BadInput(f"{name}: text_config is a {type(text).__name__}, an object is expected")
    family = str(text.get("model_type") or config.get("model_type") or "missing").removesuffix("_text")
    quant = next((q for c in (config, text) if isinstance(q := c.get("quantization_config"), dict)), {})
    refused = [f"{what} ({key})" for key, what in TABLES["refused"].items() if text.get(key) or config.get(key)]
    refused += ["an MXFP4 checkpoint"] * (quant.get("quant_method") == "mxfp4")
    refused += [f"model_type {family!r}"] * (family not in TABLES["families"])
    if refused:
        raise NotCovered(f"{name}: {refused[0]} is not covered; covered are {TABLES['covered']}")
    tie, inner = config.get("tie_word_embeddings"), text.get("tie_word_embeddings")
    if tie not in (None, inner) and inner not in (None, "unknown"):
        assumed.append("tie_word_embeddings: wrapper and text_config contradict each other, the wrapper's is taken")
    text = text | {"tie_word_embeddings": inner if tie is None else tie}
    facts = TABLES["families"][family]
    f = _Fields(text, name, facts["defaults"], assumed)
    hidden, heads = f.number("hidden_size"), f.need("num_attention_heads")
    f.defaults = {"num_key_value_heads": heads} | f.defaults
    if family in ("llama", "qwen2") and hidden and hidden % heads == 0 and text.get("head_dim") is None:
        f.config = text | {"head_dim": hidden // heads}
    count = f.need("num_hidden_layers")
    shape = {"layers": _layers(f, facts, count), "dtype": _dtype(f, config)}
    for part in ("all", *facts["parts"]):
        shape |= f.sizes(part)
    if heads % shape["kv_heads"]:
        raise BadInput(f"{name}: num_attention_heads {heads} is no multiple of num_key_value_heads {shape['kv_heads']}")
    if "moe" in facts["parts"]:
        every, dense = f.number("decoder_sparse_step") or 1, f.get("mlp_only_layers", list) or []
        shape["moe_layers"] = tuple(i for i in range(count) if i not in dense and (i + 1) % every == 0)
    if "gdn" in facts["parts"]:
        shape["gated"] = text.get("attn_output_gate") is not False
        shape["state_dtype"] = f.get("mamba_ssm_dtype", str)
        if shape["state_dtype"] is None and family != "qwen3_next":
            assumed.append("mamba_ssm_dtype is absent: states in the model's dtype, as vLLM keeps them then")
    if isinstance(config.get("vision_config"), dict) and "vision" in facts:
        shape["vision"] = _vision(f, config["vision_config"], facts["vision"], hidden)
    tied, scheme = f.get("tie_word_embeddings"), quant.get("kv_cache_scheme")
    float8 = isinstance(scheme, dict) and scheme.get("num_bits") == 8 and scheme.get("type") == "float"
    return ModelShape(
        name,
        family,
        tied=None if tied is None else bool(tied),
        attention_bias=bool(f.get("attention_bias")) or family == "qwen2",
        mlp_bias=bool(f.get("mlp_bias")),
        rotary_elements=_rotary(f, family, shape["head_dim"], shape.get("max_position", 0)),
        quantization=quant.get("quant_method"),
        quant_config=quant,
        kv_scheme="fp8" if float8 else None,
        assumed=tuple(assumed),
        **shape,
    )


def _layers(f: _Fields, facts: dict, count: int) -> tuple[str, ...]:
    """The kind of each layer: named, or by the family's rule that every n-th is full attention."""
    kinds, types = TABLES["layer_types"], f.get("layer_types", list)
    if types is not None and len(types) != count:
        raise BadInput(f"{f.name}: layer_types names {len(types)} layers, num_hidden_layers says {count}")
    if unknown := {str(t) for t in types or ()} - set(kinds):
        named = ", ".join(sorted(unknown))
        raise NotCovered(f"{f.name}: layer type {named} is not covered; covered are {', '.join(kinds)}")
    if types is None and "every" in facts:
        every, other = f.need(facts["every"]), "gdn" if "gdn" in facts["parts"] else "sliding"
        return tuple("full" if (i + 1) % every == 0 else other for i in range(count))
    if types is None and f.get("use_sliding_window") and f.get("sliding_window"):
        raise NotCovered(f"{f.name}: use_sliding_window without layer_types is not covered; name the layers there")
    return tuple(kinds[t] for t in types or ["full_attention"] * count)


def _dtype(f: _Fields, config: dict) -> str:
    named = (c.get(k) for c in (f.config, config) for k in ("dtype", "torch_dtype"))
    found = str(next((n for n in named if n not in (None, "unknown")), "absent")).removeprefix("torch.")
    served = "bfloat16" if found in ("absent", "float32") else found  # vLLM's "auto" serves float32 in 16 bits
    f.assumed += [f"dtype is {found}: bfloat16 assumed"] if served != found else []
    return served


def _rotary(f: _Fields, family: str, head_dim: int, positions: int) -> int:
    """Elements of the cos/sin caches, rows × rotary size: mRoPE keeps four times the maximum position, linear and YaRN
    scaling their factor times; Gemma 3 has one cache for full and one for sliding layers."""
    rope = next((r for k in ("rope_parameters", "rope_scaling") if isinstance(r := f.get(k), dict) and r), {})
    rope = rope["full_attention"] if isinstance(rope.get("full_attention"), dict) else rope
    own = f.config.get("partial_rotary_factor")
    rope = rope if own in (None, "unknown") else rope | {"partial_rotary_factor": own}
    r, kind, rows = _Fields(rope, f.name, f.defaults, f.assumed), rope.get("rope_type") or rope.get("type"), positions
    if kind in ("linear", "yarn"):
        original = r.number("original_max_position_embeddings") if kind == "yarn" else None
        rows = int((original or positions) * (r.number("factor", 0.001, float) or 1.0))
    rows = rows * (4 if "mrope_section" in rope else 1) + (positions if family == "gemma3" else 0)
    return rows * int(head_dim * (r.number("partial_rotary_factor", 0.001, float) or 1.0))


def _vision(f: _Fields, config: dict, style: str, hidden: int | None) -> Vision:
    defaults = {"out_hidden_size": hidden} | TABLES["fields"][style]["defaults"]
    sizes = _Fields(config, f"{f.name} vision_config", defaults, f.assumed).sizes(style)
    if style == "siglip":
        positions = (sizes["positions"] // sizes["patch"]) ** 2
        sizes |= {"positions": positions, "out": hidden or 0, "channels": 3, "temporal": 1, "merger": False}
    elif hidden and sizes["out"] != hidden:
        raise BadInput(f"{f.name}: vision out_hidden_size {sizes['out']} is not the text model's hidden_size {hidden}")
    sizes["patch"] = sizes["patch"] ** 2 * sizes.pop("channels") * sizes.pop("temporal")
    return Vision(**sizes)
