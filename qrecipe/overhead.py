"""What stands between weights and KV pool: transient peak, CUDA graphs, non-torch memory. Estimates, each with a band.

The transient peak is the largest of three phases of vLLM's profile run, tensor by tensor as 0.27.0 holds them: the vision
encoder on as many of the largest pictures as max_num_batched_tokens holds (at least one), the forward pass over
max_num_batched_tokens, and the sampler on max_num_seqs rows of logits. Checked on 16 eager starts on an H200 (2026-11-30),
some of them with an account of PyTorch's allocator. The fitted numbers are the constants below; they come from Qwen3.5-4B,
H200, vLLM 0.27.0, unless another start is named.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from qrecipe.flags import Flags
from qrecipe.shape import ModelShape

GIB = 2**30
BIG_CARD_GIB = 70  # vLLM's own threshold for larger batch defaults
PICTURE_TOKENS = {True: 16_384, False: 256}  # of the largest picture: Qwen's tower with a merger, Gemma's without
SAMPLER_BYTES = 14  # a logit: in 16 and in 32 bits, its probability, the noise
TOP_K_ROWS = 132  # rows of 32-bit logits that the top-k kernel keeps for good: one a multiprocessor (132 on an H200)
GRAPH_GIB = 0.0088  # a full graph of 32 layers (51 piecewise + 51 full: 0.50 estimated, 0.66 actual; + 35: 0.36, 0.52)
PIECEWISE_GIB = 0.001, 0.0041  # a piecewise graph, estimated (vLLM's own minimum) and actual
CUDA_GIB = {True: 0.30, False: 0.18}  # kernels, workspaces, rests of segments; big card or not (0.3 to 0.5 on 24 GB)
CUBLAS_BYTES, LARGEST_KEPT_BYTES = 32 * 2**20, 512 * 2**20
CUDA_GRAPHS_GIB = 0.16  # more with graphs (0.62 in all on the H200)
# With several ranks, fitted on three starts of two H200s that NVLink joins (tests/data/starts/two-h200):
CUDA_RANKS_GIB = 0.16  # kernels, eager or not: NCCL starts before vLLM first looks at the memory, and the rest with it
NCCL_GIB = 0.95  # so this lies outside of gpu_memory_utilization (0.91; 0.96 with vLLM's own all-reduce)
SPLIT_GRAPHS = 0.8, 0.57  # of a full graph, what tensor parallelism splits, estimated and actual (0.32, 0.53)
NCCL_CALL_GIB = 3.3e-4, 2.7e-4  # an all-reduce by NCCL in a full graph, the embedding's and two a layer (1.40, 1.41)
PEAK_BANDS = (0.03, 0.15, 0.35)  # relative: seen on Qwen3.5; another family, or experts (one start, of 35B-A3B); both
ESTIMATE_BANDS, ACTUAL_BANDS = (0.12, 0.5), (0.3, 0.35)  # of the graphs, relative: the size of the fit, any other
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


def workspace_bytes(shape: ModelShape, tokens: int, tp: int) -> int:
    """The two buffers that the experts of all layers share for good: each token's experts, the wider of what goes in and out."""
    m, h = shape.moe_intermediate // tp, shape.hidden or 0
    return 2 * tokens * shape.experts_per_token * (max(m, h) + max(2 * m, h)) if shape.experts else 0


def transient(shape: ModelShape, f: Flags, quantized: bool) -> Estimate:
    """Peak of the profile run above what stays, without the graph estimate."""
    seqs, tokens, tp = f.max_num_seqs, f.max_num_batched_tokens, f.tensor_parallel_size
    h, v, rows, seen = shape.hidden or 0, shape.vocab or 0, min(seqs, tokens), shape.family.startswith("qwen3_5")
    held = encoder = pictures = 0
    if not f.text_only and (t := shape.vision):
        size = PICTURE_TOKENS[t.merger]
        pictures = max(1, tokens // size)
        patches = pictures * (size * t.merge**2 if t.merger else t.positions)
        held = 2 * pictures * size * h + 2 * patches * t.patch  # the pictures and what the encoder made of them
        attention, mlp = 6 * t.hidden * (1 + 1 / tp), 4 * t.hidden + 2 * t.intermediate / tp
        block = max(attention, mlp) + quantized * t.hidden / 2
        encoder = (
            2 * patches * (block + t.patch * min(2, pictures) + 64)
        )  # several are joined: there twice for a moment
    gdn = 2 * (shape.gdn_k_heads * shape.gdn_k_dim + shape.gdn_v_heads * shape.gdn_v_dim)
    wide = 3 * (shape.intermediate or 0) / tp + 5 * h  # of experts only what the router keeps: their buffers stay
    sampler = rows * v * SAMPLER_BYTES + 2 * (2 * rows + tokens) * h + held
    top_k, experts = top_k_bytes(shape, seqs, tokens), workspace_bytes(shape, tokens, tp)
    forward = 2 * tokens * max(wide, 3 * gdn / tp + 2 * h) + held - top_k
    phases = {  # bytes: how
        sampler: f"sampler: {rows} rows × {v} logits × {SAMPLER_BYTES} B + what is held",
        forward: f"forward pass: {tokens} tokens through the widest layer + what is held",
        encoder - top_k - experts: f"vision encoder: {pictures} × the largest picture",
    }
    peak = max(phases)
    band = PEAK_BANDS[bool(shape.experts) + (not seen)]
    return Estimate(peak / GIB, peak / GIB * band, phases[peak])


def graphs(shape: ModelShape, f: Flags, total_gib: float | None) -> tuple[Estimate, Estimate]:
    """(vLLM's own estimate before capture, actual size after it), by the number of graphs and of layers. Between smaller cards
    it is not known who adds up, NCCL or vLLM's own kernel: half of NCCL's part is taken, and the band holds none and all."""
    if f.enforce_eager:
        return (Estimate(0.0, 0.0, "no graphs: --enforce-eager"),) * 2
    seqs, tokens, spec, tp = f.max_num_seqs, f.max_num_batched_tokens, f.speculative_tokens, f.tensor_parallel_size
    limit = min(2 * seqs * (1 + spec), 512, tokens)
    sizes = [i for i in (1, 2, 4, *range(8, 256, 8), *range(256, 513, 16)) if i <= limit]  # captured by 0.27.0
    full, layers = sum(s <= seqs * (1 + spec) for s in sizes), len(shape.layers)
    each, wider = GRAPH_GIB * layers / 32, ((shape.hidden or 2560) / 2560) ** 0.5  # wider: 9B 0.40, 27B 0.54 estimated
    other = (shape.hidden, layers, tp) not in ((2560, 32, 1), (2560, 32, 2))
    calls, how = full * (2 * layers + 1) * (tp > 1), f"{len(sizes)} piecewise + {full} full graphs of {layers} layers"
    share = 1.0 if f.disable_custom_all_reduce else 0.5 * ((total_gib or 0) < BIG_CARD_GIB)
    how += f" + {calls} all-reduces{', half of them' * (share < 1)} by NCCL" * (calls * share > 0)
    how, found = f"{how} (fitted on Qwen3.5-4B on an H200{', two of them' * (tp > 1)})", []
    for i, (one, bands) in enumerate(((each * wider, ESTIMATE_BANDS), (each, ACTUAL_BANDS))):
        gib, nccl = full * one * (1 - SPLIT_GRAPHS[i] * (1 - 1 / tp)), calls * NCCL_CALL_GIB[i]
        gib += len(sizes) * PIECEWISE_GIB[i] + nccl * share
        found.append(Estimate(gib, gib * bands[other] + nccl * share * (share < 1), how))
    return found[0], replace(found[1], how=f"{how}; actual − estimate comes on top of the peak")


def non_torch(shape: ModelShape, f: Flags, total_gib: float) -> Estimate:
    """What stays besides the weights, the CUDA context left out: kernels, the input buffer, the top-k buffer, the experts'
    buffers, and eagerly what they keep of the allocator's segments; NCCL lies outside. The band holds one more such segment."""
    seqs, tokens, tp = f.max_num_seqs, f.max_num_batched_tokens, f.tensor_parallel_size
    several = tp * f.pipeline_parallel_size > 1
    base, extra = CUDA_GIB[total_gib >= BIG_CARD_GIB], 0 if f.enforce_eager else CUDA_GRAPHS_GIB
    base, extra = (CUDA_RANKS_GIB, 0) if several else (base, extra)
    kept, row, top_k = 0, 2 * tokens * (shape.hidden or 0), top_k_bytes(shape, seqs, tokens)
    if f.enforce_eager:
        # cuBLAS lies in the first norm's 32-bit copy, the top-k buffer in the smallest freed block that holds it
        logits = 4 * min(seqs, tokens) * (shape.vocab or 0)
        kept = min((x - top_k for x in (row, logits) if top_k <= x <= LARGEST_KEPT_BYTES), default=0)
        kept += 0 if shape.vision and not f.text_only else max(0, 2 * row - CUBLAS_BYTES)
    experts = workspace_bytes(shape, tokens, tp) / GIB
    sizes = {"input buffer": row / GIB, "top-k buffer": top_k / GIB, "of kept segments": kept / GIB}
    sizes |= {"experts' buffers": experts} if experts else {}
    how = f"{base} CUDA kernels" + "".join(f" + {x:.2f} {name}" for name, x in sizes.items() if x or kept)
    how += f" + {extra} for graphs" * (extra > 0) + "; NCCL lies outside (fitted on two H200s)" * several
    band = max(NON_TORCH_BAND_GIB, 2 * tokens * (shape.intermediate or 0) / GIB)
    return Estimate(base + sum(sizes.values()) + extra, band + CUDA_RANKS_GIB * several, how)
