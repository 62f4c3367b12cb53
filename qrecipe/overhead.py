"""What stands between weights and KV pool: transient peak, CUDA graphs, non-torch memory. Estimates, each with a band.

The transient peak is the largest of three phases of vLLM's profile run: the vision encoder on one picture of 16,384 tokens
(65,536 patches), the forward pass over max_num_batched_tokens, and the sampler on max_num_seqs rows of logits. Fitted on
Qwen3.5-4B, H200, vLLM 0.27.0, 2026-11-30: 3.63 GiB with 1,024 sequences (sampler), 1.57 with 256 (encoder); the forward
pass on Llama-3.1-8B, 20,000 tokens (2.07 GiB, vllm issue 10517). Graphs: 0.50 estimated and 0.66 actual with 51 + 51
graphs, 0.36 and 0.52 with 51 + 35; for other shapes scaled by hidden size × layers.
"""

from __future__ import annotations

from dataclasses import dataclass

from qrecipe.shape import ModelShape

GIB = 2**30
ENCODER_TOKENS = 16_384
SAMPLER_BYTES = 14.8  # bytes a logit: 16-bit and 32-bit logits, probabilities, the top-k/top-p copy, a mask
BIG_CARD_GIB = 70  # vLLM's own threshold for larger batch defaults


@dataclass(frozen=True)
class Estimate:
    """A figure in GiB with its absolute band and how it came about."""

    gib: float
    band: float
    how: str


def batch_defaults(total_gib: float, card_name: str = "", world_size: int = 1, max_model_len: int = 10**9) -> tuple[int, int]:
    """(max_num_seqs, max_num_batched_tokens) that `vllm serve` 0.27.0 takes by itself: 1,024 and 8,192 from 70 GiB on
    (not on an A100), else 256 and 2,048."""
    big = total_gib >= BIG_CARD_GIB and "a100" not in card_name.lower()
    seqs, tokens = (1024, 8192) if big else (256, 2048)
    return seqs, min(tokens, seqs * max_model_len)


def capture_sizes(max_num_seqs: int, max_num_batched_tokens: int, tokens_per_seq: int = 1) -> list[int]:
    """Batch sizes for which vLLM 0.27.0 captures graphs: 1, 2, 4, then steps of 8 up to 256 and of 16 up to the limit."""
    limit = min(2 * max_num_seqs * tokens_per_seq, 512, max_num_batched_tokens)
    sizes = [i for i in (1, 2, 4) if i <= limit] + list(range(8, min(limit + 1, 256), 8))
    return sizes + (list(range(256, limit + 1, 16)) if limit >= 256 else [])


def transient(shape: ModelShape, seqs: int, tokens: int, *, vision: bool, tp: int = 1, speculative_tokens: int = 0) -> Estimate:
    """Peak of the profile run above what stays, without the graph estimate."""
    h, v = shape.hidden or 0, shape.vocab or 0
    kept = 2 * h * (tokens + (ENCODER_TOKENS if vision else 0))
    rows = min(seqs * (1 + speculative_tokens), tokens)
    phases = {"sampler": rows * v * SAMPLER_BYTES + kept, "forward pass": tokens * _forward_width(shape, tp) * 2 + kept}
    if vision and shape.vision:
        t = shape.vision
        patches = ENCODER_TOKENS * t.merge**2
        phases["vision encoder"] = patches * 2 * (3 * t.hidden + 2 * t.intermediate / tp + t.channels * t.patch**2 * t.temporal)
    name = max(phases, key=phases.get)
    what = {"sampler": f"{rows} rows × {v} logits × {SAMPLER_BYTES} B", "forward pass": f"{tokens} tokens through the widest layer",
            "vision encoder": f"one picture of {ENCODER_TOKENS} tokens"}[name]
    gib = phases[name] / GIB
    known = shape.family == "qwen3_5" and name != "forward pass"
    return Estimate(gib, gib * (0.05 if known and h == 2560 else 0.15 if known else 0.35), f"{name}: {what} (+ what is kept)")


def _forward_width(shape: ModelShape, tp: int) -> float:
    """Values a token needs at the widest point of a decoder layer."""
    wide = [3 * (shape.intermediate or 0) / tp]
    if shape.hybrid:
        wide.append(3 * 2 * (shape.gdn_k_heads * shape.gdn_k_dim + shape.gdn_v_heads * shape.gdn_v_dim) / tp)
    if shape.experts:
        m = shape.moe_intermediate / tp
        wide.append(shape.experts_per_token * (max(2 * m, shape.hidden or 0) + m))
    return max(wide) + 3 * (shape.hidden or 0)


def graphs(shape: ModelShape, seqs: int, tokens: int, speculative_tokens: int = 0) -> tuple[Estimate, Estimate]:
    """(vLLM's own estimate before capture, actual size after it)."""
    sizes = capture_sizes(seqs, tokens, 1 + speculative_tokens)
    full = sum(s <= seqs * (1 + speculative_tokens) for s in sizes)
    scale = (shape.hidden or 2560) * len(shape.layers) / (2560 * 32)
    estimate, actual = scale * (0.05 + 0.0088 * full), 0.21 + 0.0088 * full * scale**0.5
    at_home = abs(scale - 1) < 0.01
    how = f"{len(sizes)} piecewise + {full} full graphs, × {scale:.2f} for hidden size × layers (fitted on Qwen3.5-4B, H200)"
    return Estimate(estimate, estimate * (0.12 if at_home else 0.6), how), Estimate(actual, actual * (0.35 if not at_home else 0.3), how)


def non_torch(total_gib: float, eager: bool, world_size: int = 1) -> Estimate:
    """CUDA modules, workspaces and, with several ranks, NCCL: what stays besides the weights (not the CUDA context)."""
    base = 0.46 if total_gib >= BIG_CARD_GIB else 0.30
    extra = 0 if eager else 0.16
    ranks = 0.5 if world_size > 1 else 0.0
    how = f"{base} + {extra} for graphs" + (f" + {ranks} for NCCL (assumed)" if ranks else "")
    return Estimate(base + extra + ranks, 0.2 + ranks, how + "; fitted: 0.62 with graphs and 0.46 eager on an H200, 0.3 to 0.5 on 24 GB cards")
