"""What stands between weights and KV pool: transient peak, CUDA graphs, non-torch memory. Estimates, each with a band.

The transient peak is the largest of three phases of vLLM's profile run, tensor by tensor as 0.27.0 holds them: the vision
encoder on as many of the largest pictures as max_num_batched_tokens holds (at least one), the forward pass over
max_num_batched_tokens, and the sampler on max_num_seqs rows of logits. Checked on nine starts on an H200 (2026-11-30). The
fitted numbers are the constants below; they come from Qwen3.5-4B, H200, vLLM 0.27.0, unless another start is named.
"""

from __future__ import annotations

from dataclasses import dataclass

from qrecipe.shape import ModelShape

GIB = 2**30
BIG_CARD_GIB = 70  # vLLM's own threshold for larger batch defaults
PICTURE_TOKENS = {True: 16_384, False: 256}  # of the largest picture: Qwen's tower with a merger, Gemma's without
SAMPLER_BYTES = 14  # a logit: in 16 and in 32 bits, its probability, the noise
TOP_K_ROWS = 132  # rows of 32-bit logits that the top-k kernel keeps for good: one a multiprocessor (132 on an H200)
GRAPH_GIB = 0.0088  # a full graph of 32 layers (51 piecewise + 51 full: 0.50 estimated, 0.66 actual; + 35: 0.36, 0.52)
PIECEWISE_GIB = 0.001, 0.0041  # a piecewise graph, estimated (vLLM's own minimum) and actual
CUDA_GIB = {True: 0.30, False: 0.18}  # kernels and their workspaces; big card or not (0.3 to 0.5 in all on 24 GB cards)
CUDA_GRAPHS_GIB, CUDA_RANKS_GIB = 0.16, 0.5  # with graphs (0.62 in all on the H200); with NCCL (assumed)
PEAK_BANDS = (0.03, 0.15, 0.35)  # relative: phases seen on Qwen3.5, on other families, and what no start has shown
ESTIMATE_BANDS, ACTUAL_BANDS = (0.12, 0.6), (0.3, 0.35)  # of the graphs, relative: the size of the fit, any other
NON_TORCH_BAND_GIB = 0.15
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


def top_k_bytes(shape: ModelShape, seqs: int, tokens: int) -> int:
    """The buffer of the top-k kernel: rows by the next power of two, at most one a multiprocessor."""
    return min(1 << (min(seqs, tokens) - 1).bit_length(), TOP_K_ROWS) * (shape.vocab or 0) * 4


def transient(shape: ModelShape, seqs: int, tokens: int, vision: bool, tp: int, quantized: bool) -> Estimate:
    """Peak of the profile run above what stays, without the graph estimate."""
    h, v, rows, seen = shape.hidden or 0, shape.vocab or 0, min(seqs, tokens), shape.family == "qwen3_5"
    held = encoder = pictures = 0
    if vision and (t := shape.vision):
        size = PICTURE_TOKENS[t.merger]
        pictures = max(1, tokens // size)
        patches = pictures * (size * t.merge**2 if t.merger else t.positions)
        held = 2 * pictures * size * h + 2 * patches * t.patch  # the pictures and what the encoder made of them
        attention, mlp = 6 * t.hidden * (1 + 1 / tp), 4 * t.hidden + 2 * t.intermediate / tp
        block = max(attention, mlp) + quantized * t.hidden / 2
        encoder = 2 * patches * (block + t.patch + 64)
    gdn = 2 * (shape.gdn_k_heads * shape.gdn_k_dim + shape.gdn_v_heads * shape.gdn_v_dim)
    m, experts = shape.moe_intermediate / tp, shape.experts_per_token
    wide = max(3 * (shape.intermediate or 0) / tp, 3 * gdn / tp, experts * (max(2 * m, h) + m))
    sampler = rows * v * SAMPLER_BYTES + 2 * (2 * rows + tokens) * h + held
    stays = top_k_bytes(shape, seqs, tokens)  # first allocated in the sampler: the log takes it off the other phases
    forward = 2 * tokens * (wide + 5 * h) + held - stays
    phases = {  # bytes: how
        sampler: f"sampler: {rows} rows × {v} logits × {SAMPLER_BYTES} B + what is held",
        forward: f"forward pass: {tokens} tokens through the widest layer + what is held",
        encoder - stays: f"vision encoder: {pictures} × the largest picture",
    }
    peak = max(phases)
    band = PEAK_BANDS[2 if pictures > 1 or shape.experts else 0 if seen else 1]
    return Estimate(peak / GIB, peak / GIB * band, phases[peak])


def graphs(shape: ModelShape, seqs: int, tokens: int, spec: int, eager: bool) -> tuple[Estimate, Estimate]:
    """(vLLM's own estimate before capture, actual size after it), by the number of graphs and of layers."""
    if eager:
        return (Estimate(0.0, 0.0, "no graphs: --enforce-eager"),) * 2
    limit = min(2 * seqs * (1 + spec), 512, tokens)
    sizes = [i for i in (1, 2, 4, *range(8, 256, 8), *range(256, 513, 16)) if i <= limit]  # captured by 0.27.0
    full, layers = sum(s <= seqs * (1 + spec) for s in sizes), len(shape.layers)
    estimate, actual = (len(sizes) * piece + full * GRAPH_GIB * layers / 32 for piece in PIECEWISE_GIB)
    other = shape.hidden != 2560 or layers != 32
    how = f"{len(sizes)} piecewise + {full} full graphs of {layers} layers (fitted on Qwen3.5-4B on an H200)"
    after = Estimate(actual, actual * ACTUAL_BANDS[other], f"{how}; actual − estimate comes on top of the peak")
    return Estimate(estimate, estimate * ESTIMATE_BANDS[other], how), after


def non_torch(shape: ModelShape, seqs: int, tokens: int, total_gib: float, eager: bool, ranks: int) -> Estimate:
    """What stays besides the weights, the CUDA context left out: kernels, the input buffer, the top-k buffer, NCCL. The band
    holds a segment of the allocator that one of them keeps from being given back: up to the widest activation."""
    base, extra = CUDA_GIB[total_gib >= BIG_CARD_GIB], 0 if eager else CUDA_GRAPHS_GIB
    nccl = CUDA_RANKS_GIB if ranks > 1 else 0.0
    inputs, top_k = 2 * tokens * (shape.hidden or 0) / GIB, top_k_bytes(shape, seqs, tokens) / GIB
    how = f"{base} CUDA kernels + {inputs:.2f} input buffer + {top_k:.2f} top-k buffer + {extra} for graphs"
    how += f" + {nccl} for NCCL (assumed)" if nccl else ""
    segment = 4 * tokens * (shape.intermediate or 0) / GIB
    return Estimate(base + inputs + top_k + extra + nccl, max(NON_TORCH_BAND_GIB, segment) + nccl, how)
