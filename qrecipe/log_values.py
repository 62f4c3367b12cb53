"""What a log's words come to: flags from a printed dict, ranks from processes, tokens from the old engine's blocks."""

import ast
import re
from typing import Any

from .log_words import RANK_FIELDS


def _literal(text: str) -> Any:
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError, RecursionError, MemoryError, TypeError):
        return text


PRINTED_DICT = re.compile(r"'(\w{1,60})': ('[^'\n]{0,400}'|\[[^\[\]\n]{0,400}\]|\{[^{}\n]{0,400}\}|[\w.+-]{1,60})")
SETTINGS = re.compile(r"\b(\w{1,60})=('[^'\n]{0,400}'|\[[^\[\]\n]{0,400}\]|[\w.+-]{1,60})(?=[,)]|$)")
ENGINE_SETTINGS = {
    "model", "speculative_config", "dtype", "max_seq_len", "load_format", "tensor_parallel_size",
    "pipeline_parallel_size", "data_parallel_size", "quantization", "enforce_eager", "kv_cache_dtype",
    "device_config", "enable_prefix_caching", "served_model_name", "trust_remote_code",
}  # fmt: skip


def pairs(pattern: re.Pattern, text: str) -> dict[str, Any]:
    return {m[1]: _literal(m[2].removeprefix("torch.")) for m in pattern.finditer(text)}


def ranks_of(labels: list[str], values: dict[str, dict[str, list]]) -> list[dict[str, Any]]:
    """One row a rank. Without process labels, repeated figures of one start are taken as ranks in their order."""
    rows = []
    for label in labels:
        found = {name: values.get(name, {}).get(label, []) for name in RANK_FIELDS}
        count = max(map(len, found.values())) if label == "" else 1
        for i in range(count):
            row = {name: (v[min(i, len(v) - 1)] if v else None) for name, v in found.items()}
            rows.append({"rank": re.split(r"[ ,]", label)[0] or (str(i) if count > 1 else ""), "process": label, **row})
    return rows


def tokens_from_blocks(figures: dict[str, Any], flags: dict, config: dict) -> None:
    """The old engine logs blocks, not tokens: tokens = blocks x block size, when the log fixes the block size."""
    blocks, per_request = figures.get("gpu_blocks"), figures.get("max_model_len")
    if blocks is None or figures.get("kv_cache_tokens") is not None:
        return
    size = flags.get("block_size")
    if not isinstance(size, int) and figures.get("max_concurrency") and per_request:
        said = figures["max_concurrency"]
        size = next((b for b in (8, 16, 32, 64, 128, 256) if abs(blocks * b / per_request - said) <= 0.0051), None)
    elif not isinstance(size, int) and (flags or config):
        size = 16  # the log lists the flags and block_size is not among them
    if isinstance(size, int):
        figures["kv_cache_tokens"] = blocks * size
