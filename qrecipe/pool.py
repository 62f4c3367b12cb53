"""The capacity law: how vLLM turns available bytes into KV-cache blocks, tokens and concurrency.

Page: the bytes of one block of one layer on one rank. Layers of one kind form groups of equal size g; one block id of the
shared pool costs g × page. Gated DeltaNet layers keep one state a request, padded up to the attention page.
Read from vLLM 0.27.0 (v1/core/kv_cache_utils.py, v1/kv_cache_interface.py, platforms/interface.py) and tested against it.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

from qrecipe.errors import BadInput
from qrecipe.shape import ModelShape

DTYPE_BYTES = {"bfloat16": 2, "float16": 2, "half": 2, "float32": 4, "float": 4}
KV_DTYPES = {"bfloat16": 2, "float16": 2, "fp8": 1, "fp8_e4m3": 1, "fp8_e5m2": 1, "fp8_inc": 1}
TOKENS_FROM_CONCURRENCY = (0, 21)  # from this version on the token line is int(blocks / need × max_model_len)


def version_tuple(version: str | None) -> tuple[int, int]:
    """(major, minor) of a vLLM version; an unknown or development version counts as 0.27."""
    import re

    found = re.match(r"v?(\d+)\.(\d+)", str(version or ""))
    return (int(found[1]), int(found[2])) if found and found[0] not in ("0.0", "v0.0") else (0, 27)


@dataclass(frozen=True)
class Pool:
    """The layout of one model's KV pool. Bytes are those of one rank.

    groups: kind → number of groups; group_layers: the largest group of each pipeline stage; in_flight: tokens that may be
    scheduled but not yet freed (what a sliding window reserves).
    """

    block_tokens: int
    page_bytes: int
    token_bytes: int  # attention bytes of one token in one layer
    state_bytes: int
    groups: tuple[tuple[str, int], ...]
    group_layers: tuple[int, ...]
    window: int | None
    in_flight: int
    state_blocks: int  # blocks one request needs in each GDN group

    @property
    def padding_percent(self) -> float:
        return 100 * (self.page_bytes - self.state_bytes) / self.state_bytes if self.state_bytes else 0.0

    @property
    def group_count(self) -> int:
        return sum(n for _, n in self.groups)

    @property
    def pool_block_bytes(self) -> int:
        """Bytes of one block id on the stage that holds most layers."""
        return max(self.group_layers) * self.page_bytes

    def need(self, length: int) -> int:
        """Blocks that one request of `length` tokens takes, summed over groups."""
        blocks = 0
        for kind, n in self.groups:
            if kind == "full":
                each = ceil(length / self.block_tokens)
            elif kind == "sliding":
                each = ceil(min(self.window - 1 + self.in_flight, length) / self.block_tokens) + 1
            else:
                each = self.state_blocks
            blocks += n * each
        return blocks

    def blocks(self, available: float | list[float]) -> int:
        """Blocks in `available` bytes: a number for every stage alike, or one number a pipeline stage."""
        each = available if isinstance(available, list) else [available] * len(self.group_layers)
        return max(0, min(int(a // self.page_bytes // g) for a, g in zip(each, self.group_layers, strict=True) if g))

    def tokens(self, blocks: int, length: int, version: str = "0.27.0") -> int:
        """The "GPU KV cache size" line: since 0.21 it depends on max_model_len (`length`), before only on blocks."""
        if version_tuple(version) >= TOKENS_FROM_CONCURRENCY:
            return int(blocks / self.need(length) * length)
        return blocks // self.group_count * self.block_tokens

    def concurrency(self, blocks: int, length: int) -> float:
        return blocks / self.need(length)

    def fits(self, length: int, available: float | list[float]) -> bool:
        """Whether vLLM accepts this max_model_len: one full-length request within what is available on every stage."""
        each = available if isinstance(available, list) else [available] * len(self.group_layers)
        return all(self.need(length) * g * self.page_bytes <= a for a, g in zip(each, self.group_layers, strict=True) if g)

    def longest(self, available: float | list[float], limit: int) -> int:
        """vLLM's "estimated maximum model length": the largest length ≤ limit that fits; 0 if not even one token does."""
        low, high = 0, limit
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self.fits(middle, available) else (low, middle - 1)
        return low


def kv_bytes(kv_cache_dtype: str, dtype: str, shape: ModelShape) -> int:
    """Bytes of one KV value; "auto" takes the checkpoint's own scheme, else the model's dtype."""
    name = (shape.kv_scheme or dtype) if kv_cache_dtype in (None, "auto") else str(kv_cache_dtype)
    if name not in KV_DTYPES:
        raise BadInput(f"kv_cache_dtype {name!r} is not covered; covered are auto, {', '.join(KV_DTYPES)}")
    return KV_DTYPES[name]


def plan_pool(
    shape: ModelShape,
    *,
    dtype: str = "bfloat16",
    kv_cache_dtype: str = "auto",
    mamba_ssm_cache_dtype: str | None = None,
    prefix_caching: bool = False,
    speculative_tokens: int = 0,
    block_size: int | None = None,
    tensor_parallel_size: int = 1,
    pipeline_parallel_size: int = 1,
    max_num_batched_tokens: int = 2048,
    async_scheduling: bool = True,
) -> Pool:
    """Lay out the pool. Raises BadInput when tensor parallelism does not divide the heads or a window is unknown."""
    tp, pp = tensor_parallel_size, pipeline_parallel_size
    check_parallel(shape, tp, pp)
    heads = max(1, shape.kv_heads // tp)
    token = 2 * heads * shape.head_dim * kv_bytes(kv_cache_dtype, dtype, shape)
    block, state = block_size or 16, 0
    if shape.hybrid:
        state = state_bytes(shape, dtype, mamba_ssm_cache_dtype, speculative_tokens, tp)
        align = max(16, block)
        block = max(block, align * ceil(state / (align * token)))
    kinds = list(shape.layers)
    if speculative_tokens:
        kinds += ["full"] * max(1, shape.mtp_layers)
    if "sliding" in kinds and shape.window is None:
        raise BadInput(f"{shape.name}: its sliding_window is unknown; give a full config.json")
    in_flight = max_num_batched_tokens * (pp if pp > 1 else 2 if async_scheduling else 1)
    groups, largest = _group(kinds, split_layers(len(shape.layers), pp))
    return Pool(
        block, block * token, token, state, groups, largest, shape.window, in_flight,
        (2 if prefix_caching else 1) + speculative_tokens,
    )


def state_bytes(shape: ModelShape, dtype: str, state_dtype: str | None, speculative_tokens: int, tp: int) -> int:
    """Convolution and recurrent state of one Gated DeltaNet layer on one rank, in bytes."""
    name = shape.state_dtype or dtype if state_dtype in (None, "auto") else state_dtype
    if name not in DTYPE_BYTES:
        raise BadInput(f"mamba_ssm_cache_dtype {name!r} is unknown; use auto, {', '.join(DTYPE_BYTES)}")
    channels = (2 * shape.gdn_k_heads * shape.gdn_k_dim + shape.gdn_v_heads * shape.gdn_v_dim) // tp
    conv = (shape.conv_kernel - 1 + speculative_tokens) * channels * DTYPE_BYTES[dtype]
    return conv + shape.gdn_v_heads // tp * shape.gdn_v_dim * shape.gdn_k_dim * DTYPE_BYTES[name]


def check_parallel(shape: ModelShape, tp: int, pp: int) -> None:
    """Refuse a tensor- or pipeline-parallel size that vLLM refuses."""
    if shape.heads % tp:
        raise BadInput(f"tensor_parallel_size {tp} does not divide the {shape.heads} attention heads of {shape.name}; use {_divisors(shape)}")
    if (shape.kv_heads % tp if shape.kv_heads >= tp else tp % shape.kv_heads):
        raise BadInput(f"tensor_parallel_size {tp} neither divides nor is a multiple of the {shape.kv_heads} KV heads of {shape.name}; use {_divisors(shape)}")
    if shape.hybrid and (shape.gdn_k_heads % tp or shape.gdn_v_heads % tp):
        raise BadInput(f"tensor_parallel_size {tp} does not divide the {shape.gdn_k_heads} key and {shape.gdn_v_heads} value heads of Gated DeltaNet; use {_divisors(shape)}")
    if pp > len(shape.layers):
        raise BadInput(f"pipeline_parallel_size {pp} is more than the {len(shape.layers)} layers of {shape.name}")


def _divisors(shape: ModelShape) -> str:
    fit = []
    for tp in (1, 2, 3, 4, 6, 8, 12, 16, 32):
        kv = shape.kv_heads % tp if shape.kv_heads >= tp else tp % shape.kv_heads
        if not (shape.heads % tp or kv or (shape.hybrid and (shape.gdn_k_heads % tp or shape.gdn_v_heads % tp))):
            fit.append(str(tp))
    return ", ".join(fit)


def split_layers(layers: int, pp: int) -> list[range]:
    """Layers of each pipeline stage: equal shares; what is left over goes to the stages before the last, one each."""
    counts = [layers // pp] * pp
    for i in range(2, layers % pp + 2):
        counts[-i] += 1
    starts = [sum(counts[:i]) for i in range(pp)]
    return [range(s, s + c) for s, c in zip(starts, counts, strict=True)]


def _group(kinds: list[str], stages: list[range]) -> tuple[tuple[tuple[str, int], ...], tuple[int, ...]]:
    """Groups by kind and, for each stage, the size of its largest group (a draft layer lies on the last stage)."""
    indices: dict[str, list[int]] = {}
    for i, kind in enumerate(kinds):
        indices.setdefault(kind, []).append(i)
    small, large = min(map(len, indices.values())), max(map(len, indices.values()))
    size = large if large < 1.5 * small else small
    groups, members = [], []
    for kind, mine in indices.items():
        n = ceil(len(mine) / size)
        groups.append((kind, n))
        members += [mine[i::n] for i in range(n)]
    last = len(stages) - 1
    def on(stage: int, i: int) -> bool:
        return i in stages[stage] or (stage == last and i >= stages[last].stop)
    largest = tuple(max(sum(on(s, i) for i in m) for m in members) for s in range(len(stages)))
    return tuple(groups), largest
