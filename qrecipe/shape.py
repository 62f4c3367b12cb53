"""The shape of a language model: read from a config.json, counted exactly, tensor by tensor.

`load_shape` accepts a bundled name, a config.json, a model folder, a dict or a hub id and returns a frozen `ModelShape`.
Its one source of truth is `ModelShape.tensors()`: every weight as vLLM loads it (fused q/k/v and gate/up), from which
follow the parameters by part, the bytes and the allocations. Pure arithmetic: no torch, no transformers.
Covered: Qwen3.5, Qwen3.6 and Qwen3-Next (Gated DeltaNet hybrids, dense and MoE), Qwen3, Qwen3-MoE, Qwen2, Llama, Gemma 3.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

from qrecipe.errors import BadInput

SHAPES = Path(__file__).parent / "data" / "shapes"


@dataclass(frozen=True)
class Tensor:
    """One kind of weight as vLLM holds it: `count` copies of `rows` × `cols`.

    split: what tensor parallelism does to it: "rows" or "cols" divided, "kv" (see `ModelShape.tensors`), "" replicated.
    linear: a projection that a quantization method may compress. layer: index of the decoder layer, or None.
    """

    part: str
    name: str
    rows: int
    cols: int
    split: str = ""
    linear: bool = False
    layer: int | None = None
    fp32: bool = False

    @property
    def elements(self) -> int:
        return self.rows * self.cols


@dataclass(frozen=True)
class Vision:
    """A vision tower: `style` "qwen" (Conv3d patches, 2 × 2 merger) or "siglip" (Gemma 3)."""

    style: str
    depth: int
    hidden: int
    intermediate: int
    heads: int
    patch: int
    positions: int
    channels: int = 3
    temporal: int = 2
    merge: int = 2
    out: int = 0
    deepstack: int = 0


@dataclass(frozen=True)
class ModelShape:
    """Everything the memory law needs to know of a model. Sizes are in elements; None means that the source lacks it."""

    name: str
    family: str
    layers: tuple[str, ...]  # "full", "gdn" or "sliding", in order
    heads: int
    kv_heads: int
    head_dim: int
    hidden: int | None = None
    intermediate: int | None = None
    vocab: int | None = None
    tied: bool | None = None
    max_position: int | None = None
    dtype: str = "bfloat16"
    window: int | None = None
    attention_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    gated: bool = False  # attention output gate: q_proj is twice as wide
    gdn_k_heads: int = 0
    gdn_v_heads: int = 0
    gdn_k_dim: int = 0
    gdn_v_dim: int = 0
    conv_kernel: int = 0
    state_dtype: str | None = None  # mamba_ssm_dtype of the config; None: the model's dtype
    experts: int = 0
    moe_layers: tuple[int, ...] = ()
    moe_intermediate: int = 0
    shared_intermediate: int = 0
    experts_per_token: int = 0
    mtp_layers: int = 0
    vision: Vision | None = None
    has_vision: bool = False  # a vision tower is there, even where its sizes are unknown
    rotary_dim: int = 0
    rotary_positions: int = 0  # rows of the cos/sin caches
    quantization: str | None = None  # quant_method of the config
    quant_config: dict = field(default_factory=dict, compare=False, hash=False)
    kv_scheme: str | None = None  # "fp8" when the checkpoint asks for an fp8 KV cache
    assumed: tuple[str, ...] = ()

    # --- layers -------------------------------------------------------------------------------------------------------
    def kind_count(self, kind: str) -> int:
        return self.layers.count(kind)

    @property
    def hybrid(self) -> bool:
        return "gdn" in self.layers

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of one token in all full-attention layers at two bytes a value (no padding, no state)."""
        return self.kind_count("full") * 2 * self.kv_heads * self.head_dim * 2

    # --- parameters ---------------------------------------------------------------------------------------------------
    def parameters(self) -> dict[str, int]:
        """Exact parameters by part: embedding, attention, gdn, mlp, experts, norms, vision, mtp, lm_head (tied: 0)."""
        parts = dict.fromkeys(("embedding", "attention", "gdn", "mlp", "experts", "norms", "vision", "mtp", "lm_head"), 0)
        if self.has_vision and self.vision is None:
            parts["vision"] = None
        for t in self.tensors(vision=self.vision is not None, mtp=True):
            parts[t.part] += t.elements
        return {k: v for k, v in parts.items() if v != 0 or k in ("embedding", "attention", "lm_head")}

    def count(self, vision: bool = True, mtp: bool = False) -> int:
        """Parameters in all; with the vision tower unless `vision=False`, with the draft (MTP) layers if `mtp`."""
        return sum(t.elements for t in self.tensors(vision=vision and self.has_vision, mtp=mtp))

    def tensors(self, vision: bool = True, mtp: bool = False) -> Iterator[Tensor]:
        """Every weight, fused as vLLM loads it. Raises BadInput where the source lacks a size that is needed."""
        missing = [f for f in ("hidden", "vocab", "tied") if getattr(self, f) is None]
        if self.intermediate is None and len(self.moe_layers) < len(self.layers):
            missing.append("intermediate")
        if missing:
            raise BadInput(f"{self.name}: the weights cannot be counted, its source lacks {', '.join(missing)}; give a full config.json")
        h, v = self.hidden, self.vocab
        yield Tensor("embedding", "embed_tokens", v, h, "rows")
        for i, kind in enumerate(self.layers):
            yield from self._gdn(i) if kind == "gdn" else self._attention(i, "attention")
            yield from self._mlp(i, i in self.moe_layers)
            yield Tensor("norms", "layer_norms", 4 if self.family.startswith("gemma3") else 2, h, layer=i)
        yield Tensor("norms", "final_norm", 1, h)
        if not self.tied:
            yield Tensor("lm_head", "lm_head", v, h, "rows")
        if mtp and self.mtp_layers:
            yield Tensor("mtp", "fc", h, 2 * h, "", True)
            yield Tensor("mtp", "norms", 3 + 2 * self.mtp_layers, h)
            for _ in range(self.mtp_layers):
                yield from (replace(t, part="mtp") for t in self._attention(None, "mtp"))
                yield from (replace(t, part="mtp") for t in self._mlp(None, self.experts > 0))
        if vision and self.has_vision:
            if self.vision is None:
                raise BadInput(f"{self.name}: the sizes of its vision tower are unknown; count(vision=False) or give a full config.json")
            yield from self._vision(self.vision)

    def _attention(self, i: int | None, part: str) -> Iterator[Tensor]:
        h, q, kv = self.hidden, self.heads * self.head_dim, self.kv_heads * self.head_dim
        wide = q * (2 if self.gated else 1)
        yield Tensor(part, "qkv_proj", wide + 2 * kv, h, "kv", True, i)
        yield Tensor(part, "o_proj", h, q, "cols", True, i)
        if self.attention_bias:
            yield Tensor(part, "qkv_bias", wide + 2 * kv, 1, "kv", layer=i)
        if self.output_bias:
            yield Tensor(part, "o_bias", h, 1, layer=i)
        if self.family not in ("llama", "qwen2"):
            yield Tensor(part, "qk_norm", 2, self.head_dim, layer=i)

    def _gdn(self, i: int) -> Iterator[Tensor]:
        h, k, v = self.hidden, self.gdn_k_heads * self.gdn_k_dim, self.gdn_v_heads * self.gdn_v_dim
        yield Tensor("gdn", "in_proj_qkvz", 2 * k + 2 * v, h, "rows", True, i)
        yield Tensor("gdn", "in_proj_ba", 2 * self.gdn_v_heads, h, "rows", False, i)
        yield Tensor("gdn", "conv1d", 2 * k + v, self.conv_kernel, "rows", layer=i)
        yield Tensor("gdn", "dt_bias", self.gdn_v_heads, 1, "rows", layer=i)
        yield Tensor("gdn", "A_log", self.gdn_v_heads, 1, "rows", layer=i, fp32=True)
        yield Tensor("gdn", "norm", self.gdn_v_dim, 1, layer=i)
        yield Tensor("gdn", "out_proj", h, v, "cols", True, i)

    def _mlp(self, i: int | None, moe: bool) -> Iterator[Tensor]:
        h = self.hidden
        if moe:
            m, e, s = self.moe_intermediate, self.experts, self.shared_intermediate
            yield Tensor("experts", "w13", e * 2 * m, h, "rows", True, i)
            yield Tensor("experts", "w2", e * h, m, "cols", True, i)
            yield Tensor("experts", "router", e, h, layer=i)
            if s:
                yield Tensor("experts", "shared_gate_up", 2 * s, h, "rows", True, i)
                yield Tensor("experts", "shared_down", h, s, "cols", True, i)
                yield Tensor("experts", "shared_gate", 1, h, layer=i)
        else:
            yield Tensor("mlp", "gate_up_proj", 2 * self.intermediate, h, "rows", True, i)
            yield Tensor("mlp", "down_proj", h, self.intermediate, "cols", True, i)
            if self.mlp_bias:
                yield Tensor("mlp", "bias", 2 * self.intermediate + h, 1, layer=i)

    def _vision(self, v: Vision) -> Iterator[Tensor]:
        p, d, n = "vision", v.hidden, v.depth
        patch = v.channels * v.patch * v.patch * (v.temporal if v.style == "qwen" else 1)
        yield Tensor(p, "patch_embed", d, patch)
        yield Tensor(p, "patch_bias", d, 1)
        yield Tensor(p, "pos_embed", v.positions, d)
        for _ in range(n):
            yield Tensor(p, "qkv", 3 * d, d, "rows")
            yield Tensor(p, "proj", d, d, "cols")
            yield Tensor(p, "fc1", v.intermediate, d, "rows")
            yield Tensor(p, "fc2", d, v.intermediate, "cols")
            yield Tensor(p, "biases_and_norms", 9 * d + v.intermediate, 1)  # qkv 3, proj 1, fc2 1, two norms 4; fc1
        if v.style == "siglip":
            yield Tensor(p, "post_layernorm", 2, d)
            yield Tensor(p, "mm_input_projection", d, v.out)
            yield Tensor(p, "mm_soft_emb_norm", 1, d)
            return
        wide = d * v.merge**2
        for norm in [d] + [wide] * v.deepstack:  # the merger, then the deepstack mergers (normed after the merge)
            yield Tensor(p, "merger_norm", 2, norm)
            yield Tensor(p, "merger_fc1", wide, wide, "rows")
            yield Tensor(p, "merger_fc2", v.out, wide, "cols")
            yield Tensor(p, "merger_bias", wide + v.out, 1)


# --- reading ----------------------------------------------------------------------------------------------------------
def bundled_shapes() -> list[str]:
    """Names of the shapes that come with the package."""
    return sorted(p.stem for p in SHAPES.glob("*.json"))


def load_shape(source: str | Path | dict | ModelShape) -> ModelShape:
    """Read a model's shape.

    source: a bundled name ("Qwen3.5-4B", also as "Qwen/Qwen3.5-4B"), a config.json, a folder with one, a config dict,
    or a hub id (fetched when reachable). Raises BadInput (missing, contradictory), NotCovered (another architecture).
    """
    from qrecipe.config_reader import read_config

    if isinstance(source, ModelShape):
        return source
    if isinstance(source, dict):
        return read_config(source, str(source.get("_name_or_path") or source.get("model_type") or "config"))
    text = str(source).strip()
    path = Path(text).expanduser()
    if path.is_dir():
        path = path / "config.json"
        if not path.is_file():
            raise BadInput(f"{path.parent} holds no config.json; give a model folder, a config.json or one of: {', '.join(bundled_shapes())}")
    if path.is_file():
        name = path.parent.resolve().name if path.name == "config.json" else path.stem
        return read_config(_read(path), name)
    if not text or "\0" in text or text.endswith(".json") or text.count("/") > 1 or text.startswith((".", "/", "~")):
        raise BadInput(f"no such file: {text!r}; give a config.json, a model folder, or one of: {', '.join(bundled_shapes())}")
    wanted = text.split("/")[-1].lower()
    for name in bundled_shapes():
        if name.lower() in (wanted, wanted.removesuffix("-instruct").removesuffix("-it").removesuffix("-base")):
            return read_config(_read(SHAPES / f"{name}.json"), name)
    if "/" in text:
        return read_config(_from_hub(text), wanted)
    import difflib

    near = difflib.get_close_matches(text, bundled_shapes(), 3, 0.3)
    raise BadInput(f"unknown model {text!r}; nearest bundled shapes: {', '.join(near) or ', '.join(bundled_shapes())}; or give OWNER/NAME or a config.json")


def _read(path: Path) -> dict:
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as e:
        raise BadInput(f"{path} cannot be read as JSON ({e}); give a model's config.json") from None
    if not isinstance(config, dict):
        raise BadInput(f"{path} holds a JSON {type(config).__name__}, a config.json holds an object")
    return config


def _from_hub(repo: str, timeout: float = 10) -> dict:
    """config.json of a model id, from a local cache, the Hugging Face hub or ModelScope, whichever answers first."""
    import os
    import re
    from urllib.request import urlopen

    if not re.fullmatch(r"[\w.-]+/[\w.-]+", repo):
        raise BadInput(f"{repo!r} is no model id; OWNER/NAME, a config.json or one of: {', '.join(bundled_shapes())} is expected")

    cache = Path(os.environ.get("HF_HUB_CACHE") or Path(os.environ.get("HF_HOME", "~/.cache/huggingface")).expanduser() / "hub")
    for found in sorted(cache.glob(f"models--{repo.replace('/', '--')}/snapshots/*/config.json")):
        return _read(found)
    urls = [] if os.environ.get("HF_HUB_OFFLINE") == "1" else [
        f"{os.environ.get('HF_ENDPOINT', 'https://huggingface.co')}/{repo}/resolve/main/config.json",
        f"https://modelscope.cn/models/{repo}/resolve/master/config.json",
    ]
    for url in urls:
        try:
            with urlopen(url, timeout=timeout) as answer:
                config = json.loads(answer.read(4_000_000))
                if isinstance(config, dict):
                    return config
        except (OSError, ValueError):
            continue
    raise BadInput(f"config.json of {repo!r} could not be fetched; give a local config.json, or one of: {', '.join(bundled_shapes())}")


def attention_only(name: str, layers: int, kv_heads: int, head_dim: int, sliding: int = 0, window: int | None = None) -> ModelShape:
    """A shape of which only the KV cache is known (no weights): `layers` full-attention layers plus `sliding` ones."""
    kinds = ("full",) * layers + ("sliding",) * sliding
    return ModelShape(name, "unknown", kinds, kv_heads, kv_heads, head_dim, window=window)
