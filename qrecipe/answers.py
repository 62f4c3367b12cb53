"""Answers built on the budget: longest context, smallest card, what each lever buys."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from qrecipe.cards import Card, cards
from qrecipe.errors import RecipeError
from qrecipe.memory import GIB, Budget, budget


@dataclass(frozen=True)
class Lever:
    """One change of flags and what it buys: GiB of KV pool and tokens that the pool holds (at the new settings)."""

    name: str
    flag: str
    kv_gib: float
    tokens: int
    requests: float
    note: str = ""


def largest_max_model_len(model: Any, **settings: Any) -> int:
    """The largest --max-model-len that starts with these settings, up to the model's own maximum; 0 if none does."""
    found = budget(model, **settings | {"max_model_len": None})
    return longest_of(found)


def longest_of(found: Budget) -> int:
    """The same for a budget already computed; 0 when nothing is known to be available."""
    if found.available_kv_gib is None or found.available_kv_gib <= 0:
        return 0
    each = [x * GIB for x in found.stages_gib] if found.stages_gib else found.available_kv_gib * GIB
    return found.pool.longest(each, found.shape.max_position or found.max_model_len)


def smallest_start(model: Any, *, requests: float = 1.0, **settings: Any) -> Budget | None:
    """The budget on the smallest bundled card that holds `requests` full-length requests at once; None if no card does.

    Where a hybrid model's default max_num_seqs is more than the card's blocks, max_num_seqs is set to what fits.
    """
    for card in cards():
        here = settings | {"gpu": card, "gpu_memory_gib": None, "available_kv_gib": None}
        found = budget(model, **here)
        if not found.fits and found.flags.max_num_seqs is None and (found.blocks or 0) > 0:
            found = budget(model, **here | {"max_num_seqs": min(found.blocks, found.max_num_seqs)})
        if found.fits and found.max_concurrency >= requests:
            return found
    return None


def smallest_card(model: Any, *, requests: float = 1.0, **settings: Any) -> Card | None:
    """The card of `smallest_start`."""
    found = smallest_start(model, requests=requests, **settings)
    return found.card if found else None


def levers(model: Any, **settings: Any) -> list[Lever]:
    """What each change would buy over these settings, largest gain in tokens first. Needs a card or its memory."""
    base = budget(model, **settings)
    flags, shape = base.flags, base.shape
    options: list[tuple[str, str, dict, str]] = []
    if flags.kv_cache_dtype == "auto" and not shape.kv_scheme:
        options.append(("fp8 KV cache", "--kv-cache-dtype fp8", {"kv_cache_dtype": "fp8"}, "half the bytes a token; check the quality"))
    if not base.text_only:
        options.append(("text only", "--language-model-only", {"language_model_only": True}, "no pictures, no vision tower"))
    shorter = base.max_model_len // 2
    if shorter:
        options.append(("half the context", f"--max-model-len {shorter}", {"max_model_len": shorter}, "more requests at once, each shorter"))
    higher = 0.95
    if flags.utilization < higher:
        options.append(("more of the card", f"--gpu-memory-utilization {higher}", {"gpu_memory_utilization": higher}, "only while nothing else uses the card"))
    if not flags.enforce_eager:
        options.append(("no CUDA graphs", "--enforce-eager", {"enforce_eager": True}, "slower decoding"))
    if flags.quantization is None and shape.quantization is None:
        options.append(("8-bit weights", "--quantization fp8", {"quantization": "fp8"}, "weights in fp8"))
        options.append(("4-bit weights", "an AWQ or GPTQ checkpoint", {"quantization": "awq"}, "another checkpoint"))
    if base.max_num_seqs and base.max_num_seqs > 64:
        options.append(("fewer sequences", "--max-num-seqs 64", {"max_num_seqs": 64}, "a smaller sampler peak and fewer graphs"))
    options.append(("two cards", f"--tensor-parallel-size {2 * flags.tensor_parallel_size}", {"tensor_parallel_size": 2 * flags.tensor_parallel_size}, "half the weights on each"))
    found = []
    for name, flag, change, note in options:
        try:
            other = budget(model, **settings | change)
        except RecipeError:
            continue
        if other.available_kv_gib is None or base.available_kv_gib is None:
            continue
        gain = (other.kv_cache_tokens or 0) - (base.kv_cache_tokens or 0)
        found.append(Lever(name, flag, other.available_kv_gib - base.available_kv_gib, gain, (other.max_concurrency or 0) - (base.max_concurrency or 0), note))
    return sorted(found, key=lambda x: -x.tokens)
