"""The flags of `vllm serve` that move memory, checked as they are given."""

from __future__ import annotations

import json
from dataclasses import dataclass, fields

from qrecipe.checks import check_number, version_tuple
from qrecipe.errors import BadInput

RANGES = {"gpu_memory_utilization": (0.01, 1), "speculative_tokens": (0, 64)}  # the others from 1


@dataclass(frozen=True)
class Flags:
    """Every flag of `vllm serve` that moves memory, as given; None means vLLM's default."""

    max_model_len: int | None = None
    gpu_memory_utilization: float | None = None
    dtype: str = "auto"
    quantization: str | None = None
    kv_cache_dtype: str = "auto"
    mamba_ssm_cache_dtype: str | None = None
    prefix_caching: bool | None = None
    speculative_tokens: int = 0
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    enforce_eager: bool = False
    block_size: int | None = None
    language_model_only: bool = False
    limit_mm_per_prompt: dict | str | None = None
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    data_parallel_size: int = 1
    nodes: int = 1
    disable_custom_all_reduce: bool = False
    vllm_version: str = "0.27.0"

    def __post_init__(self) -> None:
        for f in fields(self):
            value, kinds = getattr(self, f.name), f.type.split(" | ")
            if value is None:
                object.__setattr__(self, f.name, f.default)
            elif kinds[0] in ("int", "float"):
                check_number(value, f.name, *RANGES.get(f.name, (1, 10**8)), int if kinds[0] == "int" else float)
            elif type(value).__name__ not in kinds:
                raise BadInput(f"{f.name} is {value!r}; {' or '.join(k for k in kinds if k != 'None')} is expected")
        version_tuple(self.vllm_version), self.text_only
        if self.block_size and self.block_size % 16:
            raise BadInput(f"block_size is {self.block_size}; attention kernels need a multiple of 16")
        ranks = self.tensor_parallel_size * self.pipeline_parallel_size * self.data_parallel_size
        if ranks % self.nodes:
            even = [n for n in range(1, min(ranks, 64) + 1) if ranks % n == 0]
            raise BadInput(f"nodes is {self.nodes}; {ranks} (tensor × pipeline × data) ranks spread evenly over {even}")

    @property
    def text_only(self) -> bool:
        """Whether the vision tower is skipped: by the switch, or when image and video limits are both 0."""
        limits = self.limit_mm_per_prompt
        try:
            limits = json.loads(limits) if isinstance(limits, str) else limits or {}
            counts = [limits.get(name, 999) for name in ("image", "video")]
        except (ValueError, AttributeError, RecursionError):
            raise BadInput(f'limit_mm_per_prompt is {limits!r}; JSON is expected: {{"image": 4, "video": 0}}') from None
        return self.language_model_only or all((c.get("count") if isinstance(c, dict) else c) == 0 for c in counts)
