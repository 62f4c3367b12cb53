"""What stands between weights and KV pool: transient peak, CUDA graphs, non-torch memory. Estimates, each with a band.

The transient peak is the largest of three phases of vLLM's profile run: the vision encoder on one picture of 16,384 tokens,
the forward pass over max_num_batched_tokens, and the sampler on max_num_seqs rows of logits. All fitted numbers are the
constants below; they come from Qwen3.5-4B, H200, vLLM 0.27.0, 2026-11-30, unless another start is named.
"""

from __future__ import annotations

from dataclasses import dataclass

from qrecipe.shape import ModelShape

GIB = 2**30
BIG_CARD_GIB = 70  # vLLM's own threshold for larger batch defaults
ENCODER_TOKENS = 16_384
SAMPLER_BYTES = 14.8  # a logit: 16- and 32-bit logits, probabilities, the top-k/top-p copy, a mask (3.63 GiB at 1,024)
LAYER_WIDTH = 3  # copies of the widest layer and of the residual (2.07 GiB: Llama-3.1-8B, 20,000 tokens, issue 10517)
GRAPH_GIB = 0.0088  # each full graph (51 piecewise + 51 full: 0.50 estimated, 0.66 actual; 51 + 35: 0.36 and 0.52)
GRAPHS_ESTIMATE_GIB, GRAPHS_ACTUAL_GIB = 0.05, 0.21  # on top of the full graphs
NON_TORCH_GIB = {True: 0.46, False: 0.30}  # big card or not: 0.46 eager on the H200, 0.3 to 0.5 on 24 GB cards
NON_TORCH_GRAPHS_GIB, NON_TORCH_RANKS_GIB = 0.16, 0.5  # with graphs (0.62 on the H200); with NCCL (assumed)
PEAK_BANDS = (0.05, 0.15, 0.35)  # relative: the model of the fit, its family, any other or an unfitted phase
ESTIMATE_BANDS, ACTUAL_BANDS = (0.12, 0.6), (0.3, 0.35)  # of the graphs, relative: the size of the fit, any other
NON_TORCH_BAND_GIB = 0.2
CALIBRATED_BAND = 0.4  # what is left of a band after --calibrate


@dataclass(frozen=True)
class Estimate:
    """A figure in GiB with its absolute band and how it came about."""

    gib: float
    band: float
    how: str

    def scaled(self, factor: float) -> Estimate:
        """Corrected by what a real start showed."""
        return Estimate(self.gib * factor, self.band * CALIBRATED_BAND, f"{self.how}; × {factor:.3f} by --calibrate")


def batch_defaults(total_gib: float, card_name: str = "") -> tuple[int, int]:
    """(max_num_seqs, max_num_batched_tokens) of `vllm serve` 0.27.0: larger from 70 GiB on, but not on an A100."""
    return (1024, 8192) if total_gib >= BIG_CARD_GIB and "a100" not in card_name.lower() else (256, 2048)


def transient(shape: ModelShape, seqs: int, tokens: int, spec: int, vision: bool, tp: int) -> Estimate:
    """Peak of the profile run above what stays, without the graph estimate."""
    h, v, rows = shape.hidden or 0, shape.vocab or 0, min(seqs * (1 + spec), tokens)
    kept = 2 * h * (tokens + (ENCODER_TOKENS if vision else 0))
    gdn = 2 * (shape.gdn_k_heads * shape.gdn_k_dim + shape.gdn_v_heads * shape.gdn_v_dim)
    m, experts = shape.moe_intermediate / tp, shape.experts_per_token
    wide = max(LAYER_WIDTH * (shape.intermediate or 0) / tp, LAYER_WIDTH * gdn / tp, experts * (max(2 * m, h) + m))
    phases = {  # bytes: how
        rows * v * SAMPLER_BYTES + kept: f"sampler: {rows} rows × {v} logits × {SAMPLER_BYTES} B",
        tokens * (wide + LAYER_WIDTH * h) * 2 + kept: f"forward pass: {tokens} tokens through the widest layer",
    }
    if vision and (t := shape.vision):
        width = 3 * t.hidden + 2 * t.intermediate / tp + t.patch
        phases[ENCODER_TOKENS * t.merge**2 * 2 * width] = f"vision encoder: one picture of {ENCODER_TOKENS} tokens"
    peak = max(phases)
    fitted = shape.family == "qwen3_5" and not phases[peak].startswith("forward")
    band = PEAK_BANDS[0 if fitted and h == 2560 else 1 if fitted else 2]
    return Estimate(peak / GIB, peak / GIB * band, f"{phases[peak]} (+ what is kept)")


def graphs(shape: ModelShape, seqs: int, tokens: int, spec: int, eager: bool) -> tuple[Estimate, Estimate]:
    """(vLLM's own estimate before capture, actual size after it), scaled by hidden size × layers."""
    if eager:
        return (Estimate(0.0, 0.0, "no graphs: --enforce-eager"),) * 2
    limit = min(2 * seqs * (1 + spec), 512, tokens)
    sizes = [i for i in (1, 2, 4, *range(8, 256, 8), *range(256, 513, 16)) if i <= limit]  # captured by 0.27.0
    full = sum(s <= seqs * (1 + spec) for s in sizes)
    scale = (shape.hidden or 2560) * len(shape.layers) / (2560 * 32)
    estimate = scale * (GRAPHS_ESTIMATE_GIB + GRAPH_GIB * full)
    actual, other = GRAPHS_ACTUAL_GIB + GRAPH_GIB * full * scale**0.5, abs(scale - 1) >= 0.01
    how = f"{len(sizes)} piecewise + {full} full graphs, × {scale:.2f} for hidden size × layers (1: Qwen3.5-4B on an H200)"
    after = Estimate(actual, actual * ACTUAL_BANDS[other], f"{how}; actual − estimate comes on top of the peak")
    return Estimate(estimate, estimate * ESTIMATE_BANDS[other], how), after


def non_torch(total_gib: float, eager: bool, ranks: int) -> Estimate:
    """CUDA modules, workspaces and, with several ranks, NCCL: what stays besides the weights (not the CUDA context)."""
    base, extra = NON_TORCH_GIB[total_gib >= BIG_CARD_GIB], 0 if eager else NON_TORCH_GRAPHS_GIB
    nccl = NON_TORCH_RANKS_GIB if ranks > 1 else 0.0
    how = f"{base} + {extra} for graphs" + (f" + {nccl} for NCCL (assumed)" if nccl else "")
    how += "; fitted: 0.62 with graphs and 0.46 eager on an H200, 0.3 to 0.5 on 24 GB cards"
    return Estimate(base + extra + nccl, NON_TORCH_BAND_GIB + nccl, how)
