"""The loading line before the start: bytes of the weights on one rank, by dtype and quantization, as the allocator counts.

Parameters, rounded up tensor by tensor, and the rotary cos/sin cache. Qwen3.5-4B: 8.455 GiB, 0.033 of rounding (each of the
32 `down_proj` of 45 MiB occupies 46 MiB) and 0.125 of cache.
"""

import json
import re
from collections import namedtuple
from math import ceil
from pathlib import Path

from qrecipe.checks import version_tuple
from qrecipe.errors import BadInput, NotCovered
from qrecipe.flags import Flags
from qrecipe.pool import DTYPE_BYTES, split_layers
from qrecipe.shape import ModelShape, Tensor

GIB, MIB = 2**30, 2**20
TABLES = json.loads((Path(__file__).parent / "data" / "quantizations.json").read_text(encoding="utf-8"))
METHODS = TABLES["methods"]
NAMES = {name: method for method, row in METHODS.items() for name in (method, *row["names"])}
SPLIT_FROM = (0, 20)  # vLLM loads with max_split_size_mb=20: seen in 0.27, not in 0.18, assumed from 0.20 on
# stages: bytes of every pipeline stage; gib, raw (parameters), rotary (cache), rounding: of the heaviest; band: relative
Weights = namedtuple("Weights", "gib stages raw rotary rounding unquantized method band")


def method_of(shape: ModelShape, quantization: str | None) -> str | None:
    """The quantization that applies: the flag's, else the checkpoint's; NotCovered with what is covered."""
    name = str(quantization or shape.quantization or "none").lower()
    if name in ("none", "bf16", "bfloat16", "fp16", "float16"):
        return None
    if name in ("compressed-tensors", "modelopt", "modelopt_mixed"):  # the method is in the details
        said = str(shape.quant_config).lower()
        four = "'num_bits': 4" in said
        named = "nvfp4" in said or "mixed_precision" in said or (four and "'int'" not in said and "'float'" in said)
        name = "nvfp4" if named else "gptq" if four else "int8" if "'type': 'int'" in said else "fp8"
    name = "int8" if NAMES.get(name) in ("awq", "gptq") and shape.quant_config.get("bits") == 8 else name
    if name not in NAMES:
        covered = f"none, {', '.join(METHODS)} (also called {', '.join(sorted(set(NAMES) - set(METHODS)))})"
        raise NotCovered(f"quantization {name!r} is not covered; covered are {covered}")
    return NAMES[name]


def serve_dtype(shape: ModelShape, dtype: str) -> str:
    """The dtype vLLM serves in: "auto" takes the checkpoint's."""
    name = (shape.dtype if dtype == "auto" else dtype).removeprefix("torch.").lower()
    name = {"half": "float16", "float": "float32", "bf16": "bfloat16", "fp16": "float16"}.get(name, name)
    if name not in DTYPE_BYTES:
        raise BadInput(f"dtype {name!r} is unknown; use auto, bfloat16, float16 or float32")
    return name


def allocated(size: int, split_limit: bool) -> int:
    """Bytes that PyTorch's allocator counts for a tensor: whole 512 B; above 10 MiB the rest of a 2 MiB segment too where it
    is not split off: below 1 MiB, and with max_split_size_mb=20 (`split_limit`) for every tensor of 20 MiB or more."""
    size = ceil(size / 512) * 512
    segment = ceil(size / (2 * MIB)) * 2 * MIB
    whole = size > 10 * MIB and (segment - size <= MIB or (split_limit and size >= 20 * MIB))
    return segment if whole else size


def _converted(wide: int, narrow: int, freed: list[int]) -> int:
    """Bytes that a weight counts for once it is put into 8 bits while it loads: the allocator serves both from freed blocks up
    to 20 MiB larger, whole (Qwen3.5-4B: 5.45 GiB logged, 5.44 so, 5.04 without). freed: of earlier weights, changed."""
    sizes = []
    for size in (wide, narrow):
        fits = [b for b in freed if 20 * MIB <= size <= b < size + 20 * MIB]
        sizes.append(min(fits, default=allocated(size, True)))
        if fits:
            freed.remove(sizes[-1])
    freed.append(sizes[0])
    return sizes[1]


def weigh(shape: ModelShape, f: Flags) -> Weights:
    """Bytes loaded on each pipeline stage of one tensor-parallel rank. f.dtype: as served."""
    method, each = method_of(shape, f.quantization), DTYPE_BYTES[f.dtype]
    tp, pp = f.tensor_parallel_size, f.pipeline_parallel_size
    packed, band = (METHODS[method]["bytes"], METHODS[method]["band"]) if method else (each, 0.01)
    spared = _spared(shape.quant_config if f.quantization in (None, shape.quantization) else {})
    online = method == "fp8" and not shape.quantization  # of a 16-bit checkpoint, while it loads: the vision tower too
    stages, split_limit = split_layers(len(shape.layers), pp), version_tuple(f.vllm_version) >= SPLIT_FROM
    loaded, raw, kept, freed = [0] * pp, [0] * pp, set(), [[] for _ in stages]
    for t in shape.tensors(not f.text_only, f.speculative_tokens > 0):
        module = f"model.layers.{t.layer}.{TABLES['modules'].get(t.name, '')}"
        covered = t.linear and (t.part != "vision" or online) and t.part != "mtp"
        quantized = method and covered and not spared.match(module)
        if method and not quantized and t.rows * t.cols > 4 * MIB:
            kept.add(f"{t.part} {t.name}" if covered else t.part)
        size = round(_share(t, shape, tp) * (packed if quantized else each))
        for stage in _stages_of(t, shape, stages):
            if quantized and online:
                loaded[stage] += _converted(round(_share(t, shape, tp) * each), size, freed[stage])
            else:
                loaded[stage] += allocated(size, split_limit)
            raw[stage] += size
    rotary, top = shape.rotary_elements * each, max(range(pp), key=loaded.__getitem__)
    gib, everywhere = (loaded[top] + rotary) / GIB, [b + rotary for b in loaded]
    return Weights(gib, everywhere, raw[top], rotary, loaded[top] - raw[top], sorted(kept), method, band)


def _share(t: Tensor, shape: ModelShape, tp: int) -> int:
    """Elements on one tensor-parallel rank; KV heads are copied once there are more ranks than heads."""
    kv = 2 * shape.head_dim * t.cols if t.split == "kv" and tp > shape.kv_heads else 0
    return t.rows * t.cols if not t.split else ceil((t.rows * t.cols - shape.kv_heads * kv) / tp) + kv


def _stages_of(t: Tensor, shape: ModelShape, stages: list[range]) -> set[int]:
    last = len(stages) - 1
    if t.layer is not None:
        return {next(i for i, r in enumerate(stages) if t.layer in r)}
    if t.part == "embedding":
        return {0, last} if shape.tied else {0}
    return {0} if t.part == "vision" else {last}


def _spared(quant_config: dict) -> re.Pattern:
    """The checkpoint's list of unquantized modules (plain names, parts of names, globs, "re:" patterns) as one pattern."""
    entries, patterns = quant_config.get("ignore") or quant_config.get("modules_to_not_convert"), []
    for entry in entries if isinstance(entries, list) else ():
        entry = str(entry).replace("model.language_model.", "model.")
        pattern = entry[3:] if entry.startswith("re:") else rf"(.*\.)?{re.escape(entry)}(\..*)?$".replace(r"\*", ".*")
        try:
            patterns.append(re.compile(pattern).pattern)
        except re.error:
            continue
    return re.compile("|".join(f"(?:{p})" for p in patterns) or "(?!)")
