"""The capacity law: how vLLM turns available bytes into KV-cache blocks, tokens and concurrency.

Page: the bytes of one block of one layer on one rank. Layers of one kind form groups of equal size g; one block id of the
pool costs g × page. Read from vLLM 0.27.0 (v1/core/kv_cache_utils.py, platforms/interface.py) and tested against it.
"""

from bisect import bisect_right
from dataclasses import dataclass
from itertools import accumulate
from math import ceil
from typing import Any

from qrecipe.checks import version_tuple
from qrecipe.errors import BadInput
from qrecipe.flags import Flags
from qrecipe.shape import ModelShape

DTYPE_BYTES = {"bfloat16": 2, "float16": 2, "half": 2, "float32": 4, "float": 4}
KV_BYTES = {"bfloat16": 2, "float16": 2, "fp8": 1, "fp8_e4m3": 1, "fp8_e5m2": 1, "fp8_inc": 1}
TOKENS_FROM_CONCURRENCY = (0, 21)  # from this version on the token line is int(blocks / need × max_model_len)


@dataclass(frozen=True)
class Pool:
    """The layout of one model's KV pool; bytes are those of one rank. groups: kind → number of groups."""

    block_tokens: int
    token_bytes: int  # attention bytes of one token in one layer
    state_bytes: int
    groups: dict[str, int]
    group_layers: tuple[int, ...]  # the largest group of each pipeline stage
    window: int | None
    in_flight: int  # tokens scheduled but not yet freed: what a sliding window reserves
    state_blocks: int  # what a request needs in each GDN group

    @property
    def page_bytes(self) -> int:
        return self.block_tokens * self.token_bytes

    @property
    def padding_percent(self) -> float:
        return 100 * (self.page_bytes / self.state_bytes - 1) if self.state_bytes else 0.0

    @property
    def pool_block_bytes(self) -> int:
        """Bytes of one block id on the stage that holds most layers."""
        return max(self.group_layers) * self.page_bytes

    def need(self, length: int) -> int:
        """Blocks that one request of `length` tokens takes, summed over groups."""
        each = {"full": ceil(length / self.block_tokens), "gdn": self.state_blocks}
        if self.window:
            each["sliding"] = ceil(min(self.window - 1 + self.in_flight, length) / self.block_tokens) + 1
        return sum(n * each[kind] for kind, n in self.groups.items())

    def blocks(self, available: float | list[float]) -> int:
        """Blocks in `available` bytes: one number for every pipeline stage alike, or one a stage."""
        each = available if isinstance(available, list) else [available] * len(self.group_layers)
        return max(0, min(int(a // self.page_bytes // g) for a, g in zip(each, self.group_layers, strict=True) if g))

    def tokens(self, blocks: int, length: int, version: str = "0.27.0") -> int:
        """The "GPU KV cache size" line: since 0.21 it depends on max_model_len (`length`), before only on blocks."""
        if version_tuple(version) >= TOKENS_FROM_CONCURRENCY:
            return int(blocks / self.need(length) * length)
        return blocks // sum(self.groups.values()) * self.block_tokens

    def concurrency(self, blocks: int, length: int) -> float:
        return blocks / self.need(length)

    def longest(self, available: float | list[float], limit: int) -> int:
        """vLLM's "estimated maximum model length": the largest length ≤ limit that fits; 0 if not even one token does."""
        return bisect_right(range(1, limit + 1), self.blocks(available), key=self.need)


def plan_pool(shape: ModelShape, **flags: Any) -> Pool:
    """Lay out the pool by the `Flags` of `vllm serve`. BadInput when parallelism does not divide the model, or a window is
    unknown (it reserves two batches, as under asynchronous scheduling, or one a pipeline stage)."""
    f = Flags(**flags)
    tp, pp, spec, dtype = f.tensor_parallel_size, f.pipeline_parallel_size, f.speculative_tokens, f.dtype
    dtype = shape.dtype if dtype == "auto" else dtype
    check_parallel(shape, tp, pp)
    kv_dtype = (shape.kv_scheme or dtype) if f.kv_cache_dtype == "auto" else f.kv_cache_dtype
    kv_bytes = _bytes("kv_cache_dtype", kv_dtype, KV_BYTES)
    token = 2 * max(1, shape.kv_heads // tp) * shape.head_dim * kv_bytes
    block, state = f.block_size or 16, 0
    if shape.hybrid:  # convolution and recurrent state of one layer, then the block that holds it
        named = f.mamba_ssm_cache_dtype not in (None, "auto")
        state_dtype = f.mamba_ssm_cache_dtype if named else shape.state_dtype or dtype
        channels = (2 * shape.gdn_k_heads * shape.gdn_k_dim + shape.gdn_v_heads * shape.gdn_v_dim) // tp
        state = (shape.conv_kernel - 1 + spec) * channels * DTYPE_BYTES[dtype]
        recurrent = shape.gdn_v_heads // tp * shape.gdn_v_dim * shape.gdn_k_dim
        state += recurrent * _bytes("mamba_ssm_cache_dtype", state_dtype, DTYPE_BYTES)
        align = max(16, block)
        block = max(block, align * ceil(state / (align * token)))
    kinds = [*shape.layers, *["full"] * (max(1, shape.mtp_layers) if spec else 0)]
    if "sliding" in kinds and shape.window is None:
        raise BadInput(f"{shape.name}: its sliding_window is unknown; give a full config.json")
    in_flight = (f.max_num_batched_tokens or 2048) * max(2, pp)
    groups, largest = _group(kinds, split_layers(len(shape.layers), pp))
    return Pool(block, token, state, groups, largest, shape.window, in_flight, (2 if f.prefix_caching else 1) + spec)


def _bytes(flag: str, name: str, table: dict[str, int]) -> int:
    if name not in table:
        raise BadInput(f"{flag} {name!r} is not covered; covered are auto, {', '.join(table)}")
    return table[name]


def check_parallel(shape: ModelShape, tp: int, pp: int) -> None:
    """Refuse a tensor- or pipeline-parallel size that vLLM refuses. In FP8 blocks a rank's share of a width is whole blocks."""
    parts = {"attention heads": shape.heads, "KV heads": shape.kv_heads, "GDN key heads": shape.gdn_k_heads}
    parts |= {"GDN value heads": shape.gdn_v_heads, "channels of an expert": shape.moe_intermediate}
    parts["channels of the MLP"] = shape.intermediate if len(shape.moe_layers) < len(shape.layers) else 0
    block = (shape.quant_config.get("weight_block_size") or [1])[0]

    def cut(n: int) -> list[str]:  # KV heads are copied once there are more ranks than heads
        unit = {kind: block if "channels" in kind else 1 for kind in parts}
        short = {
            kind: max(h, n) % min(h, n) if "KV" in kind else h % (n * unit[kind]) for kind, h in parts.items() if h
        }
        return [f"{parts[kind]} {kind}" for kind, rest in short.items() if rest and n > 1]

    if found := cut(tp):
        whole, fit = f" in blocks of {block}" * (block > 1), [n for n in range(1, 33) if not cut(n)]
        hint = "; --enable-expert-parallel leaves experts whole" * ("expert" in str(found))
        raise BadInput(
            f"tensor_parallel_size {tp} does not divide the {', '.join(found)}{whole} of {shape.name}; use one of {fit}{hint}"
        )
    if pp > len(shape.layers):
        raise BadInput(
            f"pipeline_parallel_size {pp}: {shape.name} has {len(shape.layers)} layers; use 1 to {len(shape.layers)}"
        )


def split_layers(layers: int, pp: int) -> list[range]:
    """Layers of each pipeline stage: equal shares; what is left over goes to the stages before the last, one each."""
    counts = [layers // pp + (pp - 1 - layers % pp <= i < pp - 1) for i in range(pp)]
    return [range(end - n, end) for n, end in zip(counts, accumulate(counts), strict=True)]


def _group(kinds: list[str], stages: list[range]) -> tuple[dict[str, int], tuple[int, ...]]:
    """Groups by kind and, for each stage, the size of its largest group (a draft layer lies on the last stage)."""
    indices = {kind: [i for i, k in enumerate(kinds) if k == kind] for kind in dict.fromkeys(kinds)}
    small, large = min(map(len, indices.values())), max(map(len, indices.values()))
    size = large if large < 1.5 * small else small
    groups = {kind: ceil(len(mine) / size) for kind, mine in indices.items()}
    members = [mine[i :: groups[kind]] for kind, mine in indices.items() for i in range(groups[kind])]
    ends = [*[r.stop for r in stages[:-1]], len(kinds)]
    held = [range(r.start, end) for r, end in zip(stages, ends, strict=True)]
    return groups, tuple(max(sum(i in r for i in m) for m in members) for r in held)
