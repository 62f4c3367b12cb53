"""The memory budget of one GPU: what vLLM's log will say, before the start, each figure with its formula in `how`.

KV pool = utilization × total − consumed (weights + non-torch) − peak activation, in GiB of one rank (vLLM 0.27.0).
"""

import json
from collections import namedtuple
from dataclasses import dataclass, field, replace
from math import ceil
from pathlib import Path
from typing import Any

from qrecipe import overhead
from qrecipe.cards import Card, find_card, parse_size
from qrecipe.checks import check_number, version_tuple
from qrecipe.errors import BadInput, NotCovered, RecipeError
from qrecipe.flags import Flags
from qrecipe.overhead import GIB, Estimate
from qrecipe.pool import TOKENS_FROM_CONCURRENCY, Pool, plan_pool
from qrecipe.shape import ModelShape, load_shape
from qrecipe.weights import METHODS, SPLIT_FROM, Weights, serve_dtype, weigh

TEXTS = json.loads((Path(__file__).parent / "data" / "budget_texts.json").read_text(encoding="utf-8"))
ROUNDING_GIB = 0.005  # of the printed available memory
CONTEXT_GIB = 0.5  # what the CUDA context takes before vLLM starts
MOST_GIB = 1024  # of memory on one card: none has as much
GRAPHS_IN_PEAK = (0, 21)  # from this version on the logged peak activation holds the estimate of the CUDA graphs
JSON_KEYS, MORE_KEYS, PARTS = tuple(TEXTS["keys"]), TEXTS["more keys"], TEXTS["parts"]


# One change of flags and what it buys: GiB of KV pool, tokens and full-length requests (at the new settings).
Lever = namedtuple("Lever", "name flag kv_gib tokens requests note")


@dataclass(frozen=True)
class Budget:
    """All figures of one rank (JSON_KEYS and MORE_KEYS) are attributes, in GiB unless the name says otherwise; None where the
    flags cannot give one. flags: as given; used: with vLLM's defaults filled in."""

    shape: ModelShape
    flags: Flags
    used: Flags
    pool: Pool
    weights: Weights | None
    card: Card | None
    total_gib: float | None
    figures: dict[str, Any] = field(default_factory=dict)
    how: dict[str, str] = field(default_factory=dict)
    band_gib: dict[str, float] = field(default_factory=dict)
    advice: list[str] = field(default_factory=list)

    def __getattr__(self, name: str) -> Any:
        if name in JSON_KEYS or name in MORE_KEYS:
            return self.figures.get(name)
        raise AttributeError(f"a budget has no figure called {name!r}")

    def say(self, text: str, **values: Any) -> str:
        """`text` with the numbers put in: it may name any figure, flag and size of the pool."""
        return text.format(**vars(self.used) | vars(self.pool) | vars(self) | self.figures | values)

    def put(self, name: str, value: Any, variant: str = "", **values: Any) -> None:
        """Enter a figure with its formula; an Estimate brings its own, and an error band."""
        if isinstance(value, Estimate):
            self.band_gib[name], self.how[name] = value.band, f"{value.how}; ± {value.band:.2f}"
            self.figures[name] = value.gib
        else:
            self.figures[name] = value
            self.how[name] = self.say(TEXTS["how"][name + variant], **values)

    def as_dict(self) -> dict[str, Any]:
        """The JSON of `qrecipe size`: exactly the keys of JSON_KEYS, figures rounded as vLLM's log prints them."""
        out = {key: getattr(self, key) for key in JSON_KEYS}
        return {k: round(v, 2) if isinstance(v, float) else v for k, v in out.items()}

    def parts(self) -> list[tuple[str, float, str]]:
        """(label, GiB, note) of one card's memory, in order; they add up to the total. Empty without a card."""
        if None in (self.total_gib, self.weights_gib, self.available_kv_gib, self.activation_gib):
            return []
        sizes = {name: max(0.0, self.figures[name]) for name in PARTS.values()}
        sizes["activation_gib"] -= self.cuda_graph_estimate_gib
        parts = [
            (label, sizes[name], self.how[name]) for label, name in PARTS.items() if sizes[name] or "graph" not in name
        ]
        return [*parts, ("left free", self.total_gib - sum(sizes.values()), TEXTS["left free"])]


def budget(
    model: str | Path | dict | ModelShape,
    *,
    gpu: str | Card | None = None,
    gpu_memory_gib: float | str | None = None,
    available_kv_gib: float | None = None,
    calibrate: Any = None,
    **flags: Any,
) -> Budget:
    """Predict every memory figure of a start of `vllm serve`. model: what `load_shape` accepts. gpu, or gpu_memory_gib: its
    total as PyTorch reports it. available_kv_gib: start from the logged "Available KV cache memory". calibrate: a log of the
    reader's own start. The other keywords are the fields of `Flags`. Raises BadInput, or NotCovered outside the law."""
    shape = load_shape(model)
    if unknown := set(flags) - set(Flags.__dataclass_fields__):
        known = ", ".join(Flags.__dataclass_fields__)
        raise BadInput(f"unknown setting {', '.join(sorted(unknown))}; known are {known}")
    given = Flags(**flags)
    try:
        card = find_card(gpu) if gpu is not None else None
    except BadInput as e:
        raise BadInput(f"{e}; or give its memory instead (gpu_memory_gib; --gpu-memory)") from None
    total, factors = (None, {}) if calibrate is None else learn(calibrate, shape)
    total = card.memory_gib if card else total
    if gpu_memory_gib is not None:
        total = parse_size(gpu_memory_gib, "gpu_memory")
        if total > MOST_GIB:
            raise BadInput(
                f"gpu_memory is {total:,.0f} GiB, more than any card has; GiB are expected: what nvidia-smi prints in MiB is "
                f"written with its unit, {total:.0f}MiB ({total / 1024:.1f} GiB)"
            )
        if card and abs(total / card.memory_gib - 1) > 0.1:  # less: what such a card reports on the reader's machine
            raise BadInput(
                f"gpu_memory {total:.2f} GiB is not that of {card.name} ({card.memory_gib:.2f}): give one of them"
            )
    if available_kv_gib is not None:
        check_number(available_kv_gib, "available_kv", -(10**4), 10**6, float, " (GiB, as the log prints them)")
    assumed, mtp = list(shape.assumed), given.speculative_tokens > 0
    if mtp and not shape.hybrid:
        raise BadInput(f"speculative_tokens cover MTP layers (Qwen3.5, Qwen3.6, Qwen3-Next); {shape.name} has none")
    if mtp and not shape.mtp_layers:
        shape = replace(shape, mtp_layers=1)
        assumed.append("mtp_num_hidden_layers is absent: 1 assumed")
    f = _defaults(shape, given, card, total, assumed)
    pool = plan_pool(shape, **vars(f))
    try:
        w, why = weigh(shape, f), ""
    except BadInput as e:  # a size that only the weights need
        w, why = None, f"not known: {e}"
    b = Budget(shape, given, f, pool, w, card, total)
    b.figures.update({name: getattr(f, name) for name in MORE_KEYS if hasattr(f, name)})
    b.figures["text_only"] = not shape.vision or f.text_only
    b.how.update(weights_gib=why, fits="assumed: " + "; ".join(assumed or ["nothing"]))
    for name, e in _estimates(b).items():
        b.put(name, e.scaled(factors[name]) if name in factors else e)
    if None not in (b.weights_gib, b.non_torch_gib):
        b.figures["consumed_gib"] = b.weights_gib + b.non_torch_gib
    _put_pool(b, _available(b, available_kv_gib))
    _judge(b)
    return b


def _defaults(shape: ModelShape, f: Flags, card: Card | None, total: float | None, assumed: list[str]) -> Flags:
    """The flags with vLLM's defaults filled in where they are known, each written down in `assumed`."""
    version, length = version_tuple(f.vllm_version), f.max_model_len or shape.max_position
    if length is None:
        raise BadInput(f"{shape.name}: its maximum position is unknown; give max_model_len")
    defaults: dict[str, tuple[Any, str]] = {"max_model_len": (length, "the model's own maximum")}
    if total is not None:
        seqs, tokens = overhead.batch_defaults(total, card.name if card else "")
        why = f"vLLM's default {'from 70 GiB on' if seqs == 1024 else 'below 70 GiB and on an A100'}"
        tokens = f.max_num_batched_tokens or min(tokens, (f.max_num_seqs or seqs) * length)
        share = (0.92, "vLLM's default from 0.21 on") if version >= (0, 21) else (0.9, "vLLM's default before 0.21")
        defaults |= {"gpu_memory_utilization": share, "max_num_batched_tokens": (tokens, why)}
        defaults["max_num_seqs"] = (min(seqs, tokens), why)
    elif "sliding" in shape.layers:
        defaults["max_num_batched_tokens"] = (2048, "the card is not known")
    if shape.hybrid:
        later = (True, "seen in two logs from 0.28 on"), (False, "opt-in for hybrid models")
        defaults["prefix_caching"] = later[version < (0, 28)]
    found = {name: value for name, (value, _) in defaults.items() if getattr(f, name) is None}
    assumed += [f"{name} {value} ({defaults[name][1]})" for name, value in found.items()]
    if SPLIT_FROM <= version < (0, 27):
        assumed.append("max_split_size_mb 20 while loading (seen in 0.27, not in 0.18)")
    return replace(f, dtype=serve_dtype(shape, f.dtype), **found)


def _estimates(b: Budget) -> dict[str, Estimate]:
    """Weights, non-torch memory, peak activation and CUDA graphs, as far as shape, card and flags give them."""
    f, w, found = b.used, b.weights, {}
    ranks = f.tensor_parallel_size * f.pipeline_parallel_size
    if w:
        kind = f"{METHODS[w.method]['words']}; unquantized: {', '.join(w.unquantized)}" if w.method else f.dtype
        sizes = {name: getattr(w, name) / GIB for name in ("raw", "rotary", "rounding")}
        where = ", tightest of the ranks" if ranks > 1 else ""
        how = TEXTS["how"]["weights_gib"].format(kind=kind, where=where, **sizes)
        found["weights_gib"] = Estimate(w.gib, w.gib * w.band, how)
        loaded = {k: v for k, v in b.shape.parameters(not b.text_only, f.speculative_tokens > 0).items() if v}
        b.put("parameters", sum(loaded.values()), loaded=", ".join(f"{k} {v}" for k, v in loaded.items()))
    if f.max_num_seqs and f.max_num_batched_tokens:
        if b.total_gib is not None:
            found["non_torch_gib"] = overhead.non_torch(b.shape, f, b.total_gib)
        online = w is not None and w.method == "fp8" and not b.shape.quantization
        peak = overhead.transient(b.shape, f, online)
        graphs, found["cuda_graph_gib"] = overhead.graphs(b.shape, f, b.total_gib)
        found["cuda_graph_estimate_gib"] = graphs
        inside = graphs if version_tuple(f.vllm_version) >= GRAPHS_IN_PEAK else Estimate(0.0, 0.0, "")
        how = f"{peak.how} = {peak.gib:.2f} + {inside.gib:.2f} graph estimate"
        found["activation_gib"] = Estimate(peak.gib + inside.gib, peak.band + inside.band, how)
    return found


def _available(b: Budget, given: float | None) -> list[float] | None:
    """Bytes left for the KV pool on each pipeline stage: the given GiB, else what the estimates leave; None if unknown."""
    share, total, stages = b.used.gpu_memory_utilization, b.total_gib, b.used.pipeline_parallel_size
    if given is not None:
        free, band = [float(given)] * stages, ROUNDING_GIB
        b.put("available_kv_gib", float(given), " given", given=given)
    elif None in (total, b.weights_gib, b.activation_gib):
        return None
    else:
        factor, rest = b.weights_gib / b.weights.gib, b.non_torch_gib + b.activation_gib
        free = [(ceil(share * total * GIB) - stage * factor) / GIB - rest for stage in b.weights.stages]
        band = sum(b.band_gib[name] for name in ("weights_gib", "non_torch_gib", "activation_gib"))
        how = b.say(TEXTS["how"]["available_kv_gib"], where=" (the tightest pipeline stage)" * (stages > 1))
        b.put("available_kv_gib", Estimate(min(free), band, how))
        b.figures["stages_gib"] = tuple(free)
    b.figures["blocks_range"] = tuple(b.pool.blocks([(x + d) * GIB for x in free]) for d in (-band, band))
    return [x * GIB for x in free]


def _put_pool(b: Budget, each: list[float] | None) -> None:
    pool, version, length = b.pool, b.used.vllm_version, b.max_model_len
    align, kind = max(16, b.used.block_size or 16), " hybrid" if b.shape.hybrid else ""
    b.put("attention_block_tokens", pool.block_tokens, kind, align=align, padding=pool.padding_percent)
    b.put("page_bytes", pool.page_bytes)
    b.put("pool_block_bytes", pool.pool_block_bytes, layers=max(pool.group_layers))
    formula = " + ".join(f"{n} × {b.say(TEXTS['need'][kind])} ({kind})" for kind, n in pool.groups.items())
    b.put("blocks_per_request", pool.need(length), formula=formula)
    if each:
        low, high = b.blocks_range
        least, tokens, most = (pool.tokens(n, length, version) for n in (low, pool.blocks(each), high))
        old = " before 0.21" if version_tuple(version) < TOKENS_FROM_CONCURRENCY else ""
        b.put("blocks", pool.blocks(each), low=low, high=high)
        b.put("kv_cache_tokens", tokens, old, least=least, most=most, count=sum(pool.groups.values()))
        b.put("max_concurrency", pool.concurrency(b.blocks, length))
        b.figures["kv_cache_tokens_range"] = (least, most)


def _judge(b: Budget) -> None:
    """Whether the start succeeds, and the advice: what stands in its way, with flags to paste, or what to mind."""
    f, seqs, batch, limit = b.used, b.max_num_seqs, b.max_num_batched_tokens, b.shape.max_position
    tp, replicas = f.tensor_parallel_size, f.data_parallel_size
    per_node = tp * f.pipeline_parallel_size * replicas // f.nodes
    taken = CONTEXT_GIB + overhead.NCCL_GIB * (tp * f.pipeline_parallel_size > 1)
    values = {"card": b.card and b.card.name, "per_node": per_node, "limit": limit, "taken": taken}
    values["whose"] = "given" if b.flags.max_num_seqs else "default"
    notes = {
        "image limit": b.shape.vision and not b.text_only and f.limit_mm_per_prompt,
        "nodes": tp > per_node,
        "beyond model": limit and b.max_model_len > limit,
        "half": b.card and not b.card.bfloat16 and f.dtype == "bfloat16",
        "no card": b.blocks is None and b.total_gib is None,
        "context": b.stages_gib and (1 - f.gpu_memory_utilization) * b.total_gib < taken,
    }
    stops: dict[str, Any] = {}
    if b.blocks is not None:
        blocks, low, need, longest = b.blocks, b.blocks_range[0], b.blocks_per_request, longest_of(b)
        bound = b.shape.hybrid and not f.enforce_eager  # each running sequence needs a block of its own
        fewer = f" --max-num-seqs {blocks}" if bound and 0 < blocks < (seqs or 256) else ""
        values |= {"longest": longest, "fewer": fewer, "least": min(batch or 1, blocks if bound else 10**9)}
        values |= {"need_gib": need * b.pool_block_bytes / GIB, "together": replicas * b.max_concurrency}
        all_of_it = b.available_kv_gib + (1 - f.gpu_memory_utilization) * b.total_gib if b.total_gib else 1
        values["more"] = "raise --gpu-memory-utilization, " * (all_of_it > 0)
        stops = {
            "no memory": b.available_kv_gib <= 0,
            "too long": blocks < need and longest,
            "too small": blocks < need,
            "batch": seqs and batch and seqs > batch,
            "blocks": fewer and seqs,
        }
        b.figures["fits"] = not any(stops.values())
        notes["close"] = b.fits and (low < need or (bound and low < (seqs or 0)))
        notes["replicas"] = b.fits and replicas > 1
        notes["few blocks"] = b.fits and bound and seqs is None and blocks < 1024
    for name in [*[n for n, yes in stops.items() if yes][:1], *[n for n, yes in notes.items() if yes]]:
        b.advice.append(b.say(TEXTS["advice"][name], **values))


def longest_of(found: Budget) -> int:
    """The largest --max-model-len that starts, up to the model's own maximum; 0 when none does or nothing is known."""
    each = found.stages_gib or (found.available_kv_gib or 0.0,) * found.used.pipeline_parallel_size
    return found.pool.longest([max(0.0, x) * GIB for x in each], found.shape.max_position or found.max_model_len)


def flags_of(log: Any) -> dict[str, Any]:
    """The settings of `budget` that a StartupLog names. NotCovered: its speculation is not by the model's own MTP layers."""
    spec, named = log.flags.get("speculative_config"), log.flags
    if isinstance(spec, dict) and "mtp" not in (method := str(spec.get("method") or "mtp")):
        raise NotCovered(f"speculation by {method!r} is not covered; covered is mtp, by the model's own layers")
    flags = {k: v for k, v in named.items() if k in Flags.__dataclass_fields__}
    flags |= {"max_model_len": log.max_model_len, "vllm_version": log.vllm_version}
    flags["speculative_tokens"] = spec.get("num_speculative_tokens") if isinstance(spec, dict) else None
    flags["max_num_batched_tokens"] = named.get("max_num_batched_tokens") or log.max_num_batched_tokens
    return flags | {"prefix_caching": named.get("enable_prefix_caching")}


def learn(log: Any, model: Any) -> tuple[float | None, dict[str, float]]:
    """What one start taught: the card's total, and logged / predicted for each estimate. log: a file or a StartupLog."""
    from qrecipe.startup_log import StartupLog, read_log

    log = read_log(log) if isinstance(log, (str, Path)) else log
    if not isinstance(log, StartupLog):
        raise BadInput(f"calibrate is {log!r}; the file of a start-up log is expected")
    told = budget(model, gpu_memory_gib=log.total_gib or 80, **flags_of(log))
    seen = {name: getattr(log, name) for name in told.band_gib if name != "available_kv_gib"}
    if seen.get("weights_gib") and log.consumed_gib:
        seen["non_torch_gib"] = log.consumed_gib - log.weights_gib
    factors = {name: x / told.figures[name] for name, x in seen.items() if x and x > 0 and told.figures[name]}
    if not factors:
        raise BadInput("the log holds no memory figures to calibrate from; give the log of a complete start of vLLM")
    return log.total_gib, factors


def fitting(model: Any, **settings: Any) -> Budget:
    """The budget of these settings; where it does not fit and max_num_seqs was left open, with no more than it has blocks."""
    found = budget(model, **settings)
    if not found.fits and found.flags.max_num_seqs is None and found.blocks:
        found = budget(model, **settings | {"max_num_seqs": min(found.blocks, found.max_num_seqs)})
    return found


def levers(model: Any, **settings: Any) -> list[Lever]:
    """What each change would buy over these settings, largest gain in tokens first. Needs a card or its memory."""
    base = budget(model, **settings)
    computed = {"half": max(1, base.max_model_len // 2), "twice": 2 * base.used.tensor_parallel_size}
    keys, found = ("available_kv_gib", "kv_cache_tokens", "max_concurrency"), []
    for name, key, value, note in TEXTS["levers"]:
        value = computed.get(value, value)
        try:
            other = budget(model, **settings | {key: value})
        except RecipeError:
            continue
        if None in (base.fits, other.fits) or (key == "quantization" and base.weights and base.weights.method):
            continue
        flag = "" if value == "awq" else f"--{key.replace('_', '-')} {value}".removesuffix(" True")
        gains = [getattr(other, k) - getattr(base, k) for k in keys]
        found += [Lever(name, flag or "an AWQ or GPTQ checkpoint", *gains, note)] if max(gains) > 0 else []
    return sorted(found, key=lambda x: -x.tokens)
