"""The memory budget of one GPU: what vLLM's log will say, before the start.

`budget(...)` → `Budget`: weights + non-torch + transient peak + graph estimate, and the KV pool that is left, in GiB of one
rank, each figure with its formula in `how`. Pool = utilization × total − consumed − peak activation (vLLM 0.27.0).
Answers built on it (longest context, smallest card, levers) are in qrecipe.answers and can be called from here.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from math import ceil
from pathlib import Path
from typing import Any

from qrecipe import overhead
from qrecipe.cards import Card, find_card, parse_size
from qrecipe.errors import BadInput
from qrecipe.pool import Pool, plan_pool, version_tuple
from qrecipe.shape import ModelShape, load_shape
from qrecipe.weights import QUANTIZED, Weights, serve_dtype, weigh

GIB = 2**30
JSON_KEYS = (
    "weights_gib", "parameters", "non_torch_gib", "activation_gib", "cuda_graph_estimate_gib", "cuda_graph_gib", "available_kv_gib",
    "attention_block_tokens", "page_bytes", "pool_block_bytes", "blocks", "blocks_per_request", "kv_cache_tokens", "max_concurrency",
    "fits", "advice", "how",
)


@dataclass(frozen=True)
class Calibration:
    """What one real start taught: factors on the estimates, and measured memory in GiB. Absent figures change nothing."""

    non_torch_gib: float | None = None
    transient: float = 1.0
    estimate: float = 1.0
    actual: float = 1.0
    weights_gib: float = 0.0
    total_gib: float | None = None
    source: str = "a start-up log"


@dataclass(frozen=True)
class Flags:
    """Every flag that moves memory, as given; None means vLLM's default."""

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
    vllm_version: str = "0.27.0"

    def __post_init__(self) -> None:
        for name, f in self.__dataclass_fields__.items():
            value = getattr(self, name)
            if value is None and f.default is not None:
                object.__setattr__(self, name, f.default)
            elif f.type.startswith("str") and value is not None and not isinstance(value, str):
                raise BadInput(f"{name} is {value!r}; a name is expected, for example {'0.27.0' if name == 'vllm_version' else 'auto'}")
            elif f.type.startswith("bool") and value is not None and not isinstance(value, bool):
                raise BadInput(f"{name} is {value!r}; true or false is expected")
        for name in ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size", "nodes", "max_num_seqs",
                     "max_num_batched_tokens", "block_size", "max_model_len"):
            value, low = getattr(self, name), -1 if name == "max_model_len" else 1
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or not low <= value <= 10**8 or value == 0):
                raise BadInput(f"{name} is {value!r}; a whole number from 1 is expected")
        if isinstance(self.speculative_tokens, bool) or not isinstance(self.speculative_tokens, int) or not 0 <= self.speculative_tokens <= 64:
            raise BadInput(f"speculative_tokens is {self.speculative_tokens!r}; a whole number from 0 to 64 is expected")
        u = self.gpu_memory_utilization
        if u is not None and (isinstance(u, bool) or not isinstance(u, (int, float)) or not 0 < u <= 1):
            raise BadInput(f"gpu_memory_utilization is {u!r}; a number above 0 and up to 1 is expected, for example 0.90")
        if self.block_size and self.block_size % 16:
            raise BadInput(f"block_size is {self.block_size}; attention kernels need a multiple of 16")
        if (self.tensor_parallel_size * self.pipeline_parallel_size * self.data_parallel_size) % self.nodes:
            raise BadInput(f"{self.tensor_parallel_size} × {self.pipeline_parallel_size} × {self.data_parallel_size} ranks do not spread evenly over {self.nodes} nodes")

    @property
    def utilization(self) -> float:
        """The flag, else the default: 0.92 in 0.27.0."""
        return self.gpu_memory_utilization if self.gpu_memory_utilization is not None else 0.92 if version_tuple(self.vllm_version) >= (0, 21) else 0.9

    @property
    def text_only(self) -> bool:
        """Whether the vision tower is skipped: by the switch, or when image and video limits are both 0."""
        limits = self.limit_mm_per_prompt
        if isinstance(limits, str):
            try:
                limits = json.loads(limits)
            except ValueError:
                raise BadInput(f'limit_mm_per_prompt is {limits!r}; JSON such as {{"image": 4, "video": 0}} is expected') from None
        if limits is not None and not isinstance(limits, dict):
            raise BadInput(f'limit_mm_per_prompt is {limits!r}; an object such as {{"image": 4, "video": 0}} is expected')
        def zero(name: str) -> bool:
            value = (limits or {}).get(name, 999)
            return (value.get("count", 999) if isinstance(value, dict) else value) == 0
        return self.language_model_only or (zero("image") and zero("video"))


@dataclass(frozen=True)
class Budget:
    """All figures of one rank, in GiB unless the name says otherwise; None where the given flags cannot give it."""

    shape: ModelShape
    flags: Flags
    pool: Pool
    weights: Weights | None
    card: Card | None
    total_gib: float | None
    weights_gib: float | None = None
    parameters: int | None = None
    non_torch_gib: float | None = None
    activation_gib: float | None = None
    cuda_graph_estimate_gib: float | None = None
    cuda_graph_gib: float | None = None
    available_kv_gib: float | None = None
    attention_block_tokens: int | None = None
    page_bytes: int | None = None
    pool_block_bytes: int | None = None
    blocks: int | None = None
    blocks_per_request: int | None = None
    kv_cache_tokens: int | None = None
    max_concurrency: float | None = None
    fits: bool | None = None
    advice: list[str] = field(default_factory=list)
    how: dict[str, str] = field(default_factory=dict)
    max_model_len: int = 0
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    text_only: bool = False
    band_gib: dict[str, float] = field(default_factory=dict)
    blocks_range: tuple[int, int] | None = None
    kv_cache_tokens_range: tuple[int, int] | None = None
    stages_gib: tuple[float, ...] = ()
    calibration: Calibration | None = None

    def as_dict(self) -> dict[str, Any]:
        """The JSON of `qrecipe size`: exactly the keys of JSON_KEYS, figures rounded as vLLM's log prints them."""
        out = {key: getattr(self, key) for key in JSON_KEYS}
        return {k: round(v, 2) if isinstance(v, float) else v for k, v in out.items()}

    def parts(self) -> list[tuple[str, float, str]]:
        """(label, GiB, note) of one card's memory, in order; they add up to the total. Empty without a card."""
        if self.total_gib is None or self.weights_gib is None or self.available_kv_gib is None:
            return []
        estimate = self.cuda_graph_estimate_gib or 0.0
        parts = [("weights", self.weights_gib, self.how["weights_gib"]), ("non-torch", self.non_torch_gib, self.how["non_torch_gib"]),
                 ("activation", self.activation_gib - estimate, self.how["activation_gib"])]
        if self.cuda_graph_gib:
            parts.append(("CUDA graphs", self.cuda_graph_gib, self.how["cuda_graph_gib"]))
        parts.append(("KV pool", max(0.0, self.available_kv_gib), self.how["available_kv_gib"]))
        left = self.total_gib - sum(p[1] for p in parts)
        return [*parts, ("left free", left, "outside gpu_memory_utilization; the CUDA context (about 0.5 GiB) lies here")]


def budget(model: str | Path | dict | ModelShape, *, gpu: str | Card | None = None, gpu_memory_gib: float | str | None = None,
           available_kv_gib: float | None = None, calibrate: Any = None, **flags: Any) -> Budget:
    """Predict every memory figure of a start of `vllm serve`.

    model: what `load_shape` accepts. gpu: a card's name, or gpu_memory_gib: its total as PyTorch reports it.
    available_kv_gib: skip the estimate and start from the logged "Available KV cache memory". calibrate: a log of the
    reader's own start (path or StartupLog). The other keywords are the fields of `Flags`.
    Raises BadInput for unusable values, NotCovered for models and quantizations outside the law.
    """
    shape = load_shape(model)
    if unknown := set(flags) - set(Flags.__dataclass_fields__):
        raise BadInput(f"unknown setting {', '.join(sorted(unknown))}; known are {', '.join(Flags.__dataclass_fields__)}")
    given = Flags(**flags)
    card = find_card(gpu) if gpu is not None else None
    total = card.memory_gib if card else None
    if gpu_memory_gib is not None:
        total = parse_size(gpu_memory_gib, "gpu_memory")
    if available_kv_gib is not None and (isinstance(available_kv_gib, bool) or not isinstance(available_kv_gib, (int, float)) or not -1e4 < available_kv_gib < 1e6):
        raise BadInput(f"available_kv is {available_kv_gib!r}; GiB as the log prints them are expected, for example 10.21")
    learned = calibrate if isinstance(calibrate, Calibration) or calibrate is None else learn(calibrate, shape)
    if learned and learned.total_gib and total is None:
        total = learned.total_gib
    return _compute(shape, given, card, total, available_kv_gib, learned)


def _compute(shape: ModelShape, f: Flags, card: Card | None, total: float | None, available: float | None, learned: Calibration | None) -> Budget:
    how: dict[str, str] = {}
    advice: list[str] = []
    tp, pp, spec, mtp = f.tensor_parallel_size, f.pipeline_parallel_size, f.speculative_tokens, f.speculative_tokens > 0
    if mtp and shape.family not in ("qwen3_5", "qwen3_5_moe", "qwen3_next"):
        raise BadInput(f"speculative_tokens cover the MTP layers of Qwen3.5, Qwen3.6 and Qwen3-Next; {shape.name} has none")
    if mtp and not shape.mtp_layers:
        shape = replace(shape, mtp_layers=1, assumed=(*shape.assumed, "the config names no MTP layer: 1 assumed (vLLM's default)"))
    dtype = serve_dtype(shape, f.dtype)
    length = f.max_model_len if f.max_model_len not in (None, -1) else shape.max_position
    if length is None:
        raise BadInput(f"{shape.name}: its maximum position is unknown; give max_model_len")
    if f.max_model_len in (None, -1):
        how["max_model_len"] = f"{length}: the model's own maximum"
    elif shape.max_position and length > shape.max_position:
        advice.append(f"max_model_len {length} is more than the model's {shape.max_position}: vLLM refuses it without rope scaling and VLLM_ALLOW_LONG_MAX_MODEL_LEN=1")
    seqs, tokens = f.max_num_seqs, f.max_num_batched_tokens
    if total is not None:
        default = overhead.batch_defaults(total, card.name if card else "", max_model_len=length)
        if seqs is None or tokens is None:
            how["defaults"] = f"max_num_seqs {seqs or default[0]}, max_num_batched_tokens {tokens or default[1]}: vLLM's defaults for {'70 GiB and more' if default[0] == 1024 else 'a card below 70 GiB (or an A100)'} where not given"
        seqs, tokens = seqs or default[0], tokens or default[1]
    later = version_tuple(f.vllm_version) >= (0, 28)
    prefix = f.prefix_caching if f.prefix_caching is not None else not shape.hybrid or later
    if shape.hybrid and f.prefix_caching is None:
        how["prefix_caching"] = "on: assumed from 0.28 on (two public logs)" if later else "off: opt-in for hybrid models in 0.27"
    pool = plan_pool(shape, dtype=dtype, kv_cache_dtype=f.kv_cache_dtype, mamba_ssm_cache_dtype=f.mamba_ssm_cache_dtype, prefix_caching=prefix,
                     speculative_tokens=spec, block_size=f.block_size, tensor_parallel_size=tp, pipeline_parallel_size=pp,
                     max_num_batched_tokens=tokens or 2048)
    text_only = f.text_only or not shape.has_vision
    if shape.has_vision and not text_only and f.limit_mm_per_prompt:
        advice.append("an image limit of 0 alone saves no weights: the vision tower is skipped only with --language-model-only or image and video both 0")
    w = _weights(shape, f, dtype, text_only, mtp, how)
    values: dict[str, Any] = {"weights": w, "text_only": text_only, "max_model_len": length, "max_num_seqs": seqs, "max_num_batched_tokens": tokens}
    bands: dict[str, float] = {}
    if w:
        shift = learned.weights_gib if learned else 0.0
        values["weights_gib"], bands["weights_gib"] = w.gib + shift, w.gib * w.band
        values["parameters"] = shape.count(vision=not text_only, mtp=mtp)
    stages = [b / GIB for b in w.stages] if w else [0.0] * pp
    if seqs and tokens:
        peak = overhead.transient(shape, seqs, tokens, vision=not text_only, tp=tp, speculative_tokens=spec)
        estimate, actual = overhead.graphs(shape, seqs, tokens, spec)
        k = learned or Calibration()
        counted = 0.0 if f.enforce_eager else estimate.gib * k.estimate
        in_peak = counted if version_tuple(f.vllm_version) >= (0, 21) else 0.0
        values |= {"activation_gib": peak.gib * k.transient + in_peak, "cuda_graph_estimate_gib": counted,
                   "cuda_graph_gib": 0.0 if f.enforce_eager else actual.gib * k.actual}
        halve = 0.4 if learned else 1.0
        bands |= {"activation_gib": (peak.band + (estimate.band if in_peak else 0)) * halve, "cuda_graph_estimate_gib": estimate.band * halve if counted else 0.0,
                  "cuda_graph_gib": actual.band * halve if counted else 0.0}
        how["activation_gib"] = f"{peak.how} = {peak.gib:.2f}" + (f" × {k.transient:.3f} ({k.source})" if learned else "") + (f" + {in_peak:.2f} graph estimate" if in_peak else " (the graph estimate is not in it)") + f"; ± {bands['activation_gib']:.2f}"
        how["cuda_graph_estimate_gib"] = "no graphs: --enforce-eager" if f.enforce_eager else f"{estimate.how}; ± {bands['cuda_graph_estimate_gib']:.2f}"
        how["cuda_graph_gib"] = "no graphs: --enforce-eager" if f.enforce_eager else f"{actual.how}; ± {bands['cuda_graph_gib']:.2f}; only actual − estimate comes on top of consumed + activation"
    if total is not None:
        other = overhead.non_torch(total, f.enforce_eager, tp * pp)
        measured = learned.non_torch_gib if learned else None
        values["non_torch_gib"] = measured if measured is not None else other.gib
        bands["non_torch_gib"] = 0.05 if measured is not None else other.band
        how["non_torch_gib"] = (f"measured: {learned.source}" if measured is not None else other.how) + f"; ± {bands['non_torch_gib']:.2f}"
    each: float | list[float] | None = None
    if available is not None:
        each = available * GIB
        values["available_kv_gib"] = float(available)
        how["available_kv_gib"] = f"given: {available} GiB, as printed ± 0.005"
        values["blocks_range"] = (pool.blocks((available - 0.005) * GIB), pool.blocks((available + 0.005) * GIB))
    elif total is not None and w and "activation_gib" in values:
        asked = ceil(total * GIB * f.utilization) / GIB
        shift = values["weights_gib"] - w.gib
        free = [asked - b - shift - values["non_torch_gib"] - values["activation_gib"] for b in stages]
        each = [x * GIB for x in free]
        values["stages_gib"] = tuple(free)
        values["available_kv_gib"] = min(free)
        band = bands["available_kv_gib"] = sum(v for n, v in bands.items() if n in ("weights_gib", "non_torch_gib", "activation_gib"))
        how["available_kv_gib"] = (f"{f.utilization} × {round(total, 2)} − {values['weights_gib']:.2f} weights − {values['non_torch_gib']:.2f} non-torch − {values['activation_gib']:.2f} activation"
                                   f"{' (the tightest pipeline stage)' if pp > 1 else ''}; ± {band:.2f}")
        if f.utilization * total > total - 0.5:
            advice.append(f"gpu_memory_utilization {f.utilization} asks for more than is free at start: the CUDA context takes about 0.5 GiB")
        values["blocks_range"] = (pool.blocks([x - band * GIB for x in each]), pool.blocks([x + band * GIB for x in each]))
    _fill_pool(values, how, shape, f, pool, each, length)
    if each is not None:
        values["fits"] = _judge(advice, values, shape, f, pool, each, length)
    _note(how, shape, f, w, advice)
    return Budget(shape=shape, flags=f, pool=pool, card=card, total_gib=total, advice=advice, how=how, band_gib=bands, calibration=learned, **values)


def _weights(shape: ModelShape, f: Flags, dtype: str, text_only: bool, mtp: bool, how: dict[str, str]) -> Weights | None:
    try:
        w = weigh(shape, dtype=dtype, quantization=f.quantization, vision=not text_only, mtp=mtp, tp=f.tensor_parallel_size,
                  pp=f.pipeline_parallel_size, version=f.vllm_version)
    except BadInput as e:
        how["weights_gib"] = f"not known: {e}"
        return None
    bytes_each = f"{QUANTIZED[w.method][1]}; unquantized: {', '.join(w.unquantized)}" if w.method else f"{dtype}"
    how["weights_gib"] = (f"{w.raw / GIB:.3f} parameters ({bytes_each}) + {w.rotary / GIB:.3f} rotary cache + {w.rounding / GIB:.3f} allocator rounding"
                          f"{', tightest of the ranks' if f.tensor_parallel_size * f.pipeline_parallel_size > 1 else ''}; ± {w.gib * w.band:.2f}")
    how["parameters"] = "loaded: " + ", ".join(f"{k} {v}" for k, v in shape.parameters().items() if v and not (k == "vision" and text_only) and not (k == "mtp" and not mtp))
    return w


def _fill_pool(values: dict, how: dict, shape: ModelShape, f: Flags, pool: Pool, each: Any, length: int) -> None:
    need = pool.need(length)
    values |= {"attention_block_tokens": pool.block_tokens, "page_bytes": pool.page_bytes, "pool_block_bytes": pool.pool_block_bytes, "blocks_per_request": need}
    how["attention_block_tokens"] = (f"smallest multiple of {max(16, f.block_size or 16)} whose {pool.token_bytes} B a token hold the state of {pool.state_bytes} B ({pool.padding_percent:.2f} % padding)"
                                     if shape.hybrid else f"{pool.block_tokens} tokens")
    how["page_bytes"] = f"{pool.block_tokens} × {pool.token_bytes} B = {pool.page_bytes}"
    how["pool_block_bytes"] = f"group of {max(pool.group_layers)} layers × {pool.page_bytes} B"
    words = {"full": f"ceil({length}/{pool.block_tokens})", "gdn": str(pool.state_blocks), "sliding": f"ceil(min({(pool.window or 1) - 1} + {pool.in_flight}, {length})/{pool.block_tokens}) + 1"}
    how["blocks_per_request"] = " + ".join(f"{n} × {words[kind]} ({kind})" for kind, n in pool.groups) + f" = {need}"
    if each is None:
        return
    blocks = pool.blocks(each)
    low, high = values["blocks_range"]
    values |= {"blocks": blocks, "kv_cache_tokens": pool.tokens(blocks, length, f.vllm_version), "max_concurrency": pool.concurrency(blocks, length),
               "kv_cache_tokens_range": (pool.tokens(low, length, f.vllm_version), pool.tokens(high, length, f.vllm_version))}
    how["blocks"] = f"available // {pool.page_bytes} // {max(pool.group_layers)} = {blocks} (between {low} and {high})"
    new = version_tuple(f.vllm_version) >= (0, 21)
    how["kv_cache_tokens"] = (f"int({blocks} / {need} × {length})" if new else f"{blocks} // {pool.group_count} × {pool.block_tokens}") + f"; between {values['kv_cache_tokens_range'][0]} and {values['kv_cache_tokens_range'][1]}"
    how["max_concurrency"] = f"{blocks} / {need}"


def _judge(advice: list, values: dict, shape: ModelShape, f: Flags, pool: Pool, each: Any, length: int) -> bool:
    """Whether the start succeeds; where it does not, `advice` gets the flags that mend it, ready to paste."""
    seqs, blocks, kv, low = values["max_num_seqs"], values["blocks"], values["available_kv_gib"], values["blocks_range"][0]
    tight = shape.hybrid and seqs is not None and not f.enforce_eager  # each running sequence needs a block of its own
    fewer = f" --max-num-seqs {blocks}" if 0 < blocks < (seqs or 256) and shape.hybrid and not f.enforce_eager else ""
    need = pool.need(length) * pool.pool_block_bytes / GIB
    if kv <= 0:
        advice.append(f"no memory is left for the KV cache ({kv:.2f} GiB): raise --gpu-memory-utilization, quantize the weights, or take a larger card or more of them")
        return False
    if not pool.fits(length, each):
        best = pool.longest(each, length)
        advice.append(f"one request of {length} tokens needs {need:.2f} GiB of KV cache, {kv:.2f} GiB are there: " + (f"--max-model-len {best}{fewer} fits" if best else "not even one token fits"))
        return False
    if fewer and seqs:
        whose = "given" if f.max_num_seqs else "default"
        advice.append(f"the {whose} max_num_seqs {seqs} is more than the {blocks} cache blocks, and each running sequence needs one:{fewer} fits")
        return False
    if shape.hybrid and seqs is None and not f.enforce_eager and blocks < 1024:
        advice.append(f"each running sequence needs a block of its own: --max-num-seqs {blocks} or less (the default is 1024 from 70 GiB on, else 256)")
    if low < pool.need(length) or (tight and low < seqs):
        advice.append("this is close: within the error band the start may also fail; calibrate on a log of this card, or leave room")
    if f.data_parallel_size > 1:
        advice.append(f"{f.data_parallel_size} replicas: all figures are those of one, together they hold {f.data_parallel_size * values['max_concurrency']:.2f} full-length requests")
    return True


def _note(how: dict, shape: ModelShape, f: Flags, w: Weights | None, advice: list) -> None:
    if shape.assumed:
        how["assumed"] = "; ".join(shape.assumed)
    per_node = f.tensor_parallel_size * f.pipeline_parallel_size * f.data_parallel_size // f.nodes
    if f.tensor_parallel_size > per_node:
        advice.append(f"tensor parallelism of {f.tensor_parallel_size} spans nodes of {per_node} GPUs: keep it within a node and use pipeline parallelism between nodes")


def learn(log: Any, model: Any = None) -> Calibration:
    """Calibrate from one start: a log file, or a StartupLog. Needs the model (else what the log names) and its flags."""
    from qrecipe.startup_log import read_log

    log = read_log(log) if isinstance(log, (str, Path)) else log
    if not hasattr(log, "figures"):
        raise BadInput(f"calibrate is {log!r}; the file of a start-up log is expected")
    if log.consumed_gib is None and log.available_kv_gib is None and log.weights_gib is None:
        raise BadInput("the log holds no memory figures to calibrate from; give the log of a complete start of vLLM")
    shape = load_shape(model)
    flags = {k: v for k, v in (log.flags or {}).items() if k in Flags.__dataclass_fields__ and v is not None}
    flags |= {"max_num_batched_tokens": flags.get("max_num_batched_tokens") or log.max_num_batched_tokens, "vllm_version": log.vllm_version or "0.27.0"}
    plain = _compute(shape, Flags(**flags), None, log.total_gib or 80.0, None, None)
    def ratio(seen: float | None, told: float | None) -> float:
        return seen / told if seen and told else 1.0
    estimate = log.cuda_graph_estimate_gib or 0.0
    peak = log.activation_gib - estimate if log.activation_gib else None
    return Calibration(
        non_torch_gib=log.consumed_gib - log.weights_gib if log.consumed_gib and log.weights_gib else None,
        transient=ratio(peak, plain.activation_gib - plain.cuda_graph_estimate_gib), estimate=ratio(estimate, plain.cuda_graph_estimate_gib),
        actual=ratio(log.cuda_graph_gib, plain.cuda_graph_gib), weights_gib=log.weights_gib - plain.weights_gib if log.weights_gib and plain.weights_gib else 0.0,
        total_gib=log.total_gib, source=f"calibrated on a start of vLLM {log.vllm_version or 'of unknown version'}",
    )


def __getattr__(name: str) -> Any:
    if name in ("largest_max_model_len", "longest_of", "smallest_card", "smallest_start", "levers"):
        from qrecipe import answers

        return getattr(answers, name)
    raise AttributeError(name)
