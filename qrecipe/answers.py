"""Answers built on the budget: longest context, smallest card, what each lever buys."""

from collections import namedtuple
from typing import Any

from qrecipe.cards import Card, cards
from qrecipe.errors import RecipeError
from qrecipe.memory import Budget, budget, longest_of

# One change of flags and what it buys: GiB of KV pool, tokens and full-length requests (at the new settings).
Lever = namedtuple("Lever", "name flag kv_gib tokens requests note")


def largest_max_model_len(model: Any, **settings: Any) -> int:
    """The largest --max-model-len that starts with these settings, up to the model's own maximum; 0 if none does."""
    return longest_of(budget(model, **settings | {"max_model_len": None}))


def fitting(model: Any, **settings: Any) -> Budget:
    """The budget of these settings; where it does not fit and max_num_seqs was left open, with no more than it has blocks."""
    found = budget(model, **settings)
    if not found.fits and found.flags.max_num_seqs is None and found.blocks:
        found = budget(model, **settings | {"max_num_seqs": min(found.blocks, found.max_num_seqs)})
    return found


def smallest_card(model: Any, *, requests: float = 1.0, **settings: Any) -> Card | None:
    """The smallest bundled card that holds `requests` full-length requests at once, if need be with fewer sequences than
    vLLM's default; None if no card does."""
    for card in cards():
        found = fitting(model, **settings | {"gpu": card, "gpu_memory_gib": None, "available_kv_gib": None})
        if found.fits and found.max_concurrency >= requests:
            return card
    return None


def levers(model: Any, **settings: Any) -> list[Lever]:
    """What each change would buy over these settings, largest gain in tokens first. Needs a card or its memory."""
    base = budget(model, **settings)
    half, pair = max(1, base.max_model_len // 2), 2 * base.used.tensor_parallel_size
    options = [
        ("fp8 KV cache", {"kv_cache_dtype": "fp8"}, "half the bytes a token; check the quality"),
        ("text only", {"language_model_only": True}, "no pictures, no vision tower"),
        ("half the context", {"max_model_len": half}, "more requests at once, each shorter"),
        ("more of the card", {"gpu_memory_utilization": 0.95}, "only while nothing else uses the card"),
        ("no CUDA graphs", {"enforce_eager": True}, "slower decoding"),
        ("8-bit weights", {"quantization": "fp8"}, "weights in fp8"),
        ("4-bit weights", {"quantization": "awq"}, "another checkpoint"),
        ("fewer sequences", {"max_num_seqs": 64}, "a smaller sampler peak and fewer graphs"),
        ("two cards", {"tensor_parallel_size": pair}, "half the weights on each"),
    ]
    keys, found = ("available_kv_gib", "kv_cache_tokens", "max_concurrency"), []
    for name, change, note in options:
        ((key, value),) = change.items()
        try:
            other = budget(model, **settings | change)
        except RecipeError:
            continue
        if None in (base.fits, other.fits) or (key == "quantization" and base.weights and base.weights.method):
            continue
        flag = "" if value == "awq" else f"--{key.replace('_', '-')} {value}".removesuffix(" True")
        gains = [getattr(other, k) - getattr(base, k) for k in keys]
        found += [Lever(name, flag or "an AWQ or GPTQ checkpoint", *gains, note)] if max(gains) > 0 else []
    return sorted(found, key=lambda x: -x.tokens)
