"""The loading line before the start: bytes of the weights on one rank, by dtype and quantization, as the allocator counts.

"Model loading took X GiB" is what PyTorch's caching allocator holds after loading: parameters, rounded up tensor by
tensor, and buffers (the cos/sin cache of the rotary embedding). For Qwen3.5-4B: 8.455 GiB of parameters, 0.125 GiB of
cache and 0.033 GiB of rounding, since each 45 MiB `down_proj` occupies 46 MiB and there are 32 of them.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from fnmatch import fnmatch
from functools import lru_cache
from math import ceil

from qrecipe.errors import BadInput, NotCovered
from qrecipe.pool import DTYPE_BYTES, split_layers, version_tuple
from qrecipe.shape import ModelShape, Tensor

GIB, MIB = 2**30, 2**20
# bytes of one weight, scales included: (packed value + scale and zero point of its group), what it means, error band
QUANTIZED = {
    "fp8": (1.0, "1 B a weight, one scale a row", 0.03),
    "int8": (1.0, "1 B a weight, one scale a row", 0.03),
    "awq": (0.5 + 2 / 128 + 0.5 / 128, "4 bits, a 16-bit scale and a 4-bit zero point for 128 weights", 0.05),
    "gptq": (0.5 + 2 / 128 + 0.5 / 128, "4 bits, a 16-bit scale and a 4-bit zero point for 128 weights", 0.05),
    "bitsandbytes": (0.5 + 4 / 64, "4 bits, a 32-bit scale for 64 weights", 0.05),
    "nvfp4": (0.5 + 1 / 16, "4 bits, an fp8 scale for 16 weights", 0.1),
}
ALIASES = {
    "awq_marlin": "awq", "auto_awq": "awq", "gptq_marlin": "gptq", "auto_gptq": "gptq", "auto-round": "gptq", "inc": "gptq",
    "int4": "gptq", "w4a16": "gptq", "modelopt": "fp8", "modelopt_fp4": "nvfp4", "fbgemm_fp8": "fp8", "fp8_per_tensor": "fp8",
    "fp8_per_block": "fp8", "experts_int8": "int8", "int8_per_channel": "int8", "w8a8": "int8", "8-bit": "int8", "4-bit": "awq",
}
HF_NAMES = {"qkv_proj": "self_attn.q_proj", "o_proj": "self_attn.o_proj", "in_proj_qkvz": "linear_attn.in_proj_qkv", "out_proj": "linear_attn.out_proj",
            "gate_up_proj": "mlp.gate_proj", "down_proj": "mlp.down_proj", "w13": "mlp.experts.0.gate_proj", "w2": "mlp.experts.0.down_proj",
            "shared_gate_up": "mlp.shared_expert.gate_proj", "shared_down": "mlp.shared_expert.down_proj"}
VISION_LINEAR = ("qkv", "proj", "fc1", "fc2", "merger_fc1", "merger_fc2")  # vLLM gives them the quantization of the whole model


@dataclass(frozen=True)
class Weights:
    """Bytes of the tightest-loaded rank and of every pipeline stage, with what stayed in 16 bits."""

    stages: tuple[int, ...]
    raw: int  # parameters alone on the heaviest stage
    rotary: int
    rounding: int
    unquantized: tuple[str, ...]
    method: str | None
    band: float  # relative

    @property
    def gib(self) -> float:
        return max(self.stages) / GIB


def method_of(shape: ModelShape, quantization: str | None) -> str | None:
    """The quantization that applies: the flag's, else the checkpoint's; NotCovered with what is covered."""
    name = quantization or shape.quantization
    if name is None or str(name).lower() in ("none", "bf16", "bfloat16", "fp16", "float16"):
        return None
    name = str(name).lower()
    if name in ("compressed-tensors", "modelopt", "modelopt_mixed"):
        found = str(shape.quant_config).lower()
        fours = "nvfp4" in found or "mixed_precision" in found or re.search(r"'num_bits': 4, 'type': 'float'|'type': 'float', 'num_bits': 4", found)
        name = "nvfp4" if fours else "gptq" if "'num_bits': 4" in found else "int8" if "'type': 'int'" in found else "fp8"
    name = ALIASES.get(name, name)
    if name not in QUANTIZED:
        raise NotCovered(f"quantization {name!r} is not covered; covered are none, {', '.join(QUANTIZED)} (and {', '.join(sorted(ALIASES))})")
    return name


def serve_dtype(shape: ModelShape, dtype: str) -> str:
    """The dtype vLLM serves in: "auto" takes the checkpoint's."""
    name = str(dtype or "auto").removeprefix("torch.").lower()
    name = {"auto": shape.dtype, "half": "float16", "float": "float32", "bf16": "bfloat16", "fp16": "float16"}.get(name, name)
    if name not in DTYPE_BYTES:
        raise BadInput(f"dtype {name!r} is unknown; use auto, bfloat16, float16 or float32")
    return name


def allocated(size: int, scoped: bool) -> int:
    """Bytes that PyTorch's allocator counts for a tensor: whole 512 B, and from 10 MiB on whole 2 MiB segments.

    The rest of a segment counts too where it is not split off: below 1 MiB, and with `scoped` (vLLM loads with
    max_split_size_mb=20; seen in 0.27, not in 0.18) for every tensor of 20 MiB or more.
    """
    size = ceil(size / 512) * 512
    if size <= 10 * MIB:
        return size
    segment = ceil(size / (2 * MIB)) * 2 * MIB
    return size if segment - size > MIB and not (scoped and size >= 20 * MIB) else segment


@lru_cache(maxsize=256)
def weigh(shape: ModelShape, *, dtype: str = "bfloat16", quantization: str | None = None, vision: bool = True, mtp: bool = False,
          tp: int = 1, pp: int = 1, version: str = "0.27.0") -> Weights:
    """Bytes loaded on each pipeline stage of one tensor-parallel rank."""
    method = method_of(shape, quantization)
    each = DTYPE_BYTES[dtype]
    packed, _, band = QUANTIZED[method] if method else (each, "", 0.01)
    ignore = tuple(str(i) for i in shape.quant_config.get("ignore") or shape.quant_config.get("modules_to_not_convert") or ()
                   if not quantization or quantization == shape.quantization) if isinstance(shape.quant_config, dict) else ()
    stages = split_layers(len(shape.layers), pp)
    scoped = version_tuple(version) >= (0, 20)
    online = method == "fp8" and bool(quantization) and not shape.quantization  # of a 16-bit checkpoint, while it loads
    loaded, raw, kept = [0] * pp, [0] * pp, set()
    for t in shape.tensors(vision=vision, mtp=mtp):
        quantized = bool(method and t.linear and t.part != "mtp" and not _ignored(t, ignore))
        quantized |= online and t.part == "vision" and t.name in VISION_LINEAR
        if method and not quantized and t.elements > 4 * MIB:
            kept.add(t.part if t.part in ("vision", "mtp", "embedding", "lm_head") or not t.linear else f"{t.part} {t.name}")
        elements = t.elements if not t.split else _share(t, shape, tp)
        size = round(elements * (4 if t.fp32 else packed if quantized else each))
        for s in _stages_of(t, shape, stages):
            loaded[s] += allocated(size, scoped)
            raw[s] += size
    rotary = shape.rotary_positions * shape.rotary_dim * each
    heaviest = max(range(pp), key=loaded.__getitem__)
    return Weights(tuple(b + rotary for b in loaded), raw[heaviest], rotary, loaded[heaviest] - raw[heaviest], tuple(sorted(kept)), method, band)


def _share(t: Tensor, shape: ModelShape, tp: int) -> int:
    """Elements of one tensor-parallel rank; KV heads are copied once there are more ranks than heads."""
    if t.split != "kv" or tp <= shape.kv_heads:
        return ceil(t.elements / tp)
    kv = 2 * shape.kv_heads * shape.head_dim * t.cols
    return (t.elements - kv) // tp + 2 * shape.head_dim * t.cols


def _stages_of(t: Tensor, shape: ModelShape, stages: list[range]) -> list[int]:
    last = len(stages) - 1
    if t.layer is not None:
        return [next(i for i, r in enumerate(stages) if t.layer in r)]
    if t.part == "embedding":
        return [0, last] if shape.tied and last else [0]
    return [0] if t.part == "vision" else [last]


def _ignored(t: Tensor, ignore: tuple[str, ...]) -> bool:
    """Whether the checkpoint's list of unquantized modules names this tensor (plain, glob or "re:" patterns)."""
    if t.name not in HF_NAMES or t.layer is None:
        return False
    names = [f"{root}.{t.layer}.{HF_NAMES[t.name]}" for root in ("model.layers", "model.language_model.layers")]
    for entry in ignore:
        for name in names:
            if entry.startswith("re:"):
                try:
                    if re.match(entry[3:], name):
                        return True
                except re.error:
                    continue
            elif fnmatch(name, entry) or name.startswith(entry + ".") or name == entry or ("." not in entry and f".{entry}." in f".{name}."):
                return True
    return False
