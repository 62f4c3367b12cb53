"""The shape of a language model: its sizes, and every weight as vLLM loads it, exactly. Pure arithmetic, no torch.

`ModelShape.tensors()` is the one source of truth; parameters, bytes and allocations follow. Covered: data/families.json.
"""

import difflib
import json
import os
import re
from collections import namedtuple
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from qrecipe.errors import BadInput

SHAPES = Path(__file__).parent / "data" / "shapes"
PARTS = ("embedding", "attention", "gdn", "mlp", "experts", "norms", "vision", "mtp", "lm_head")


# One weight as vLLM holds it, rows × cols. split: what tensor parallelism does to it: "rows" or "cols" divided, "kv" divided
# with KV heads copied, "" whole. linear: a projection that quantization compresses. layer: index in the decoder, or None.
Tensor = namedtuple("Tensor", "part name rows cols split linear layer", defaults=("", False, None))


@dataclass(frozen=True)
class Vision:
    """A vision tower: Qwen's with its merger of merge × merge patches, or Gemma 3's SigLIP. patch: the values of one."""

    depth: int
    hidden: int
    intermediate: int
    patch: int
    positions: int
    out: int
    merge: int = 2
    merger: bool = True

    def tensors(self) -> list[Tensor]:
        d, m, wide = self.hidden, self.intermediate, self.hidden * self.merge**2
        block = [("qkv", 3 * d, d, "rows"), ("proj", d, d, "cols"), ("fc1", m, d, "rows"), ("fc2", d, m, "cols")]
        rows = [("patch and position embeddings", self.patch + 1 + self.positions, d)]
        rows += [*block, ("biases and norms", 9 * d + m, 1)] * self.depth
        if self.merger:
            rows += [("merger_fc1", wide, wide, "rows"), ("merger_fc2", self.out, wide, "cols")]
            rows += [("merger biases and norm", 2 * d + wide + self.out, 1)]
        else:
            rows += [("projection and norms", self.out + 3, d)]
        return [Tensor("vision", *row, linear=len(row) > 3) for row in rows]


@dataclass(frozen=True)
class ModelShape:
    """What the memory law needs to know of a model. Sizes in elements; None means that the source lacks it."""

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
    rotary_elements: int = 0  # of the cos/sin caches
    quantization: str | None = None  # quant_method of the config
    quant_config: dict = field(default_factory=dict)
    kv_scheme: str | None = None  # "fp8" when the checkpoint asks for an fp8 KV cache
    assumed: tuple[str, ...] = ()

    @property
    def hybrid(self) -> bool:
        return "gdn" in self.layers

    def parameters(self, vision: bool = True, mtp: bool = True) -> dict[str, int]:
        """Exact parameters by part; parts that are not there are left out (a tied lm_head is 0)."""
        parts = dict.fromkeys(PARTS, 0)
        for t in self.tensors(vision, mtp):
            parts[t.part] += t.rows * t.cols
        return {k: v for k, v in parts.items() if v or k in ("embedding", "attention", "lm_head")}

    def count(self, vision: bool = True, mtp: bool = False) -> int:
        """Parameters in all; with the vision tower unless `vision=False`, with the draft (MTP) layers if `mtp`."""
        return sum(self.parameters(vision, mtp).values())

    def tensors(self, vision: bool = True, mtp: bool = False) -> Iterator[Tensor]:
        """Every weight. Raises BadInput where the source lacks a size that is needed."""
        h, v, dense = self.hidden, self.vocab, len(self.moe_layers) < len(self.layers)
        needed = ("hidden", "vocab", "tied", "intermediate") if dense else ("hidden", "vocab", "tied")
        if lacks := ", ".join(f for f in needed if getattr(self, f) is None):
            raise BadInput(f"{self.name}: weights cannot be counted, the source lacks {lacks}; give a full config.json")
        norms = ("norms", "layer_norms", 4 if self.family == "gemma3" else 2, h)
        yield Tensor("embedding", "embed_tokens", v, h, "rows")
        for i, kind in enumerate(self.layers):
            for row in (*self._mixer(kind), *self._mlp(i in self.moe_layers), norms):
                yield Tensor(*row, layer=i)
        yield Tensor("norms", "final_norm", 1, h)
        if not self.tied:
            yield Tensor("lm_head", "lm_head", v, h, "rows")
        if mtp and self.mtp_layers:
            yield Tensor("mtp", "fc and norms", 2 * h + 3 + 2 * self.mtp_layers, h)
            for _, *row in (*self._mixer("full"), *self._mlp(self.experts > 0)) * self.mtp_layers:
                yield Tensor("mtp", *row)
        if vision and self.vision:
            yield from self.vision.tensors()

    def _mixer(self, kind: str) -> list[tuple]:
        """Attention or Gated DeltaNet of one layer; rows without the layer's number."""
        h = self.hidden
        if kind == "gdn":
            k, heads, v = self.gdn_k_heads * self.gdn_k_dim, self.gdn_v_heads, self.gdn_v_heads * self.gdn_v_dim
            small = 2 * heads * h + (2 * k + v) * self.conv_kernel + 2 * heads + self.gdn_v_dim
            return [
                ("gdn", "in_proj_qkvz", 2 * k + 2 * v, h, "rows", True),
                ("gdn", "in_proj_ba, conv1d, dt_bias, A_log and norm", small, 1, "rows"),
                ("gdn", "out_proj", h, v, "cols", True),
            ]
        q = self.heads * self.head_dim
        wide = q * (2 if self.gated else 1) + 2 * self.kv_heads * self.head_dim
        small = 0 if self.family in ("llama", "qwen2") else 2 * self.head_dim  # norms of q and k
        small += self.attention_bias * (wide + (h if self.family != "qwen2" else 0))
        return [
            ("attention", "qkv_proj", wide, h, "kv", True),
            ("attention", "o_proj", h, q, "cols", True),
            ("attention", "biases and norms", small, 1),
        ]

    def _mlp(self, moe: bool) -> list[tuple]:
        h, m, e, s = self.hidden, self.intermediate, self.experts, self.shared_intermediate
        if not moe:
            bias = ("mlp", "biases", self.mlp_bias * (2 * m + h), 1)
            return [("mlp", "gate_up_proj", 2 * m, h, "rows", True), ("mlp", "down_proj", h, m, "cols", True), bias]
        return [
            ("experts", "w13", e * 2 * self.moe_intermediate, h, "rows", True),
            ("experts", "w2", e * h, self.moe_intermediate, "cols", True),
            ("experts", "router and shared gate", e + (s > 0), h),
            ("experts", "shared_gate_up", 2 * s, h, "rows", True),
            ("experts", "shared_down", h, s, "cols", True),
        ]


def bundled_shapes() -> list[str]:
    """Names of the shapes that come with the package."""
    return sorted(p.stem for p in SHAPES.glob("*.json"))


def load_shape(source: str | Path | dict | ModelShape) -> ModelShape:
    """The shape of a bundled name ("Qwen3.5-4B", "Qwen/Qwen3.5-4B"), a config.json, a folder with one, a config dict, or a hub
    id (fetched when reachable). Raises BadInput (missing, contradictory), NotCovered (another architecture)."""
    from qrecipe.config_reader import read_config

    if isinstance(source, ModelShape):
        return source
    if isinstance(source, dict):
        return read_config(source, str(source.get("_name_or_path") or source.get("model_type") or "config"))
    text, names = str(source).strip(), bundled_shapes()
    hint = f"give a config.json, a model folder, or one of: {', '.join(names)}"
    path, wanted = Path(text.replace("\0", "?")).expanduser(), text.split("/")[-1]
    path, plain = path / "config.json" if path.is_dir() else path, re.sub("-(instruct|it|base)$", "", wanted.lower())
    bundled = next((n for n in names if n.lower() in (wanted.lower(), plain)), None)
    if path.name == "config.json" and path.parent.is_dir() and not path.exists():
        raise BadInput(f"{path.parent} is a folder without a config.json; {hint}")
    if path.is_file():
        return read_config(_read(path), path.parent.resolve().name if path.name == "config.json" else path.stem)
    if text.endswith(".json") or "/" in text and not re.fullmatch(r"[\w-][\w.-]*(/[\w.-]+)?", text):
        raise BadInput(f"no such file: {text!r}; {hint}")
    if bundled:
        return read_config(_read(SHAPES / f"{bundled}.json"), bundled)
    if "/" in text:
        return read_config(_from_hub(text, hint), wanted)
    near = ", ".join(difflib.get_close_matches(text, names, 3, 0.3) or names)
    raise BadInput(f"unknown model {text!r}; nearest bundled shapes: {near}; or give OWNER/NAME or a config.json")


def _from_hub(repo: str, hint: str) -> dict:
    """config.json of a model id: of a local cache, the Hugging Face hub or ModelScope, whichever answers first."""
    from urllib.request import urlopen

    say = os.environ.get
    cache = Path(say("HF_HUB_CACHE") or Path(say("HF_HOME", "~/.cache/huggingface"), "hub")).expanduser().resolve()
    urls = [p.as_uri() for p in cache.glob(f"models--{repo.replace('/', '--')}/snapshots/*/config.json")]
    if say("HF_HUB_OFFLINE") != "1":
        urls.append(f"{say('HF_ENDPOINT', 'https://huggingface.co')}/{repo}/resolve/main/config.json")
        urls.append(f"https://modelscope.cn/models/{repo}/resolve/master/config.json")
    why = [] if len(urls) > 1 else ["HF_HUB_OFFLINE=1 allows no network"]
    for url in urls:
        try:
            with urlopen(url, timeout=10) as answer:
                if isinstance(config := json.loads(answer.read(4_000_000)), dict):
                    return config
        except (OSError, ValueError) as e:
            why.append(f"{url.split('/')[2] or 'cache'}: {e}")
    raise BadInput(f"config.json of {repo!r} could not be fetched ({'; '.join(why)}); {hint}")


def _read(path: Path) -> dict:
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as e:
        raise BadInput(f"{path} cannot be read as JSON ({e}); give a model's config.json") from None
    if not isinstance(config, dict):
        raise BadInput(f"{path} holds a JSON {type(config).__name__}, a config.json holds an object")
    return config
