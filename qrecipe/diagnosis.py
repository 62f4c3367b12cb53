"""From the text of a failed start or request to its cause and a mend that can be pasted.

`diagnose(text)` looks for the stable words of qrecipe.failures; where memory is the cause the number in the mend is computed
by the capacity law, and checked: the value it names starts. A failure that is not in the catalogue is said to be unknown and
shown by the root-cause line of its trace. None: the text holds no failure.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from math import ceil, floor
from pathlib import PurePath
from typing import Any

from qrecipe.errors import RecipeError
from qrecipe.failures import RULES, SYMPTOMS
from qrecipe.pool import Pool, plan_pool
from qrecipe.shape import ModelShape, bundled_shapes, load_shape

GIB = 2**30
COLOUR = re.compile(r"\x1b\[[0-9;]*m")
PREFIX = re.compile(r"^\s*(?:\([^()]{0,80}\)\s*)*(?:\[[^\[\]]{0,60}\]:?\s*)*(?:(?:ERROR|CRITICAL|FATAL)\b[:\s]*)?(?:\d\d-\d\d \d\d:\d\d:\d\d\S*\s+)?(?:\[[\w./]+:\d+\]\s*)?", re.IGNORECASE)
QUIET = re.compile(r"^\s*(?:\([^()]{0,80}\)\s*)*(?:\S+ )?(?:INFO|DEBUG|WARNING)\b")
ERROR = re.compile(r"((?:[A-Za-z_]\w*\.)*[A-Za-z_]\w*(?:Error|Exception|OutOfMemory))\s*: ?(.*)")
LIMIT = 20_000  # lines kept of a long text: the first and the last


@dataclass(frozen=True)
class Failure:
    """One diagnosed failure: the cause line, when it happened, why, and what mends it."""

    text: str
    stage: str
    cause: str
    mend: str
    known: bool
    origin: str = ""


def diagnose(lines: str | Iterable[str], log: Any = None, shape: ModelShape | None = None) -> Failure | None:
    """The failure in this text, or None.

    lines: a whole log, an error body, or the error lines alone. log: its StartupLog (figures and flags for the mend); where
    it is missing and the text is a whole log, the figures are read from the text. shape: the model's, else found by name.
    """
    rows = lines.splitlines() if isinstance(lines, str) else [str(x).rstrip("\n") for x in lines]
    if len(rows) > 2 * LIMIT:
        rows = rows[:LIMIT] + rows[-LIMIT:]
    rows = [COLOUR.sub("", r)[:4000] for r in rows]
    end = next((i for i, r in enumerate(rows) if "[shutdown]" in r and "shutdown triggered" in r), len(rows))
    loud = [r for r in rows[:end] if not QUIET.match(r)]
    unwrapped = " ".join(PREFIX.sub("", r).strip() for r in loud)
    for text in (loud, [unwrapped]):
        for row in text:
            for rule in RULES:
                found = rule.pattern.search(row)
                failure = _known(rule, found, row, rows, log, shape) if found else None
                if failure:
                    return failure
    return _unknown(loud)


def _known(rule: Any, found: re.Match, row: str, rows: list[str], log: Any, shape: ModelShape | None) -> Failure | None:
    """The failure of a rule whose words were found; None where the rule's mend says that this is another case."""
    values = {k: v.replace(",", "") if re.fullmatch(r"-?[\d,.]+", v) else v.strip() for k, v in found.groupdict().items() if v}
    case = Case(values, rows, log, shape)
    mend = MENDS[rule.mend[1:]](case) if rule.mend.startswith("@") else rule.mend.format_map(values)
    if mend is None:
        return None
    stage = case.oom_stage() if rule.stage.startswith("@") else rule.stage
    text = PREFIX.sub("", row).strip()
    if len(text) > 600:
        text = text[max(0, found.start() - 200) : found.end() + 300]
    return Failure(text, stage, rule.cause.format_map(values) if "{" in rule.cause else rule.cause, mend, True, rule.origin)


def _unknown(loud: list[str]) -> Failure | None:
    """The first exception that is no mere symptom; else the first symptom, said to be one."""
    symptom = None
    for row in loud:
        text = _message(row)
        found = ERROR.match(text)
        if not found:
            continue
        if SYMPTOMS.search(text):
            symptom = symptom or text
            continue
        return Failure(text[:600], _stage(loud), "not in the catalogue: this is the root-cause line of the trace", "read the lines above it; search the issues of vLLM for these words", False)
    if symptom:
        return Failure(symptom[:600], _stage(loud), "only the last line of a failure further up, and its cause is not in this text", "read the first ERROR line higher up in the whole log", False)
    return None


def _message(row: str) -> str:
    """The message of a line: the prefix taken off, or the message field of a JSON or logfmt line."""
    if row.lstrip().startswith("{"):
        try:
            record = json.loads(row)
            row = str(next((record[k] for k in ("message", "msg", "log", "error", "text") if record.get(k)), row))
        except (ValueError, AttributeError):
            pass
    quoted = re.search(r'\b(?:msg|message)="((?:[^"\\]|\\.)*)"', row)
    return PREFIX.sub("", quoted[1] if quoted else row).strip()


def _stage(rows: list[str]) -> str:
    text = "\n".join(rows)
    for words, stage in (("capture_model", "CUDA graphs"), ("profile_run", "profile"), ("load_model", "load"), ("initialize_kv_cache", "KV sizing"), ("create_engine_config", "config")):
        if words in text:
            return stage
    return "unknown"


class Case:
    """The facts about one failure: numbers from its words, figures and flags from the log, the model's pool."""

    def __init__(self, values: dict[str, str], rows: list[str], log: Any, shape: ModelShape | None):
        self.values, self.rows = values, rows
        if log is None and any("non-default args" in r or "Available KV cache memory" in r for r in rows):
            log = _read(rows)
        self.log, self.shape = log, shape or self._shape(log)

    def number(self, name: str) -> float:
        return float(self.values[name])

    def figure(self, name: str) -> Any:
        return getattr(self.log, name, None) if self.log is not None else None

    def flag(self, name: str, default: Any = None) -> Any:
        flags = self.figure("flags") or {}
        value = flags.get(name, flags.get(name.replace("_", "-")))
        return default if value is None else value

    def _shape(self, log: Any) -> ModelShape | None:
        """The bundled shape whose name the model's path ends with, when the log's own figures agree with it."""
        flags = getattr(log, "flags", None) or {}
        name = PurePath(str(flags.get("model") or flags.get("model_tag") or "").rstrip("/")).name
        if name.lower() not in {n.lower() for n in bundled_shapes()}:
            return None
        try:
            return load_shape(name)
        except RecipeError:
            return None

    @property
    def pool(self) -> Pool | None:
        """The pool by the law, or None where the model is unknown or the log's block size disagrees."""
        if self.shape is None:
            return None
        try:
            spec = self.flag("speculative_config") or {}
            pool = plan_pool(
                self.shape, dtype={"float16": "float16", "half": "float16"}.get(str(self.flag("dtype")), "bfloat16"), kv_cache_dtype=str(self.flag("kv_cache_dtype", "auto")),
                mamba_ssm_cache_dtype=self.flag("mamba_ssm_cache_dtype"), prefix_caching=bool(self.flag("enable_prefix_caching", not self.shape.hybrid)),
                speculative_tokens=int(spec.get("num_speculative_tokens", 0)) if isinstance(spec, dict) else 0, block_size=self.flag("block_size"),
                tensor_parallel_size=int(self.flag("tensor_parallel_size", 1)), pipeline_parallel_size=int(self.flag("pipeline_parallel_size", 1)),
                max_num_batched_tokens=int(self.figure("max_num_batched_tokens") or 2048))
        except (RecipeError, ValueError, TypeError):
            return None
        seen = self.figure("attention_block_tokens")
        return pool if seen in (None, pool.block_tokens) else None

    def seqs_that_fit(self, available: float, pool: Pool | None) -> str:
        """` --max-num-seqs N` where a hybrid model with CUDA graphs would next stumble over too few blocks, else nothing."""
        if pool is None or not pool.state_bytes or self.flag("enforce_eager"):
            return ""
        blocks = pool.blocks((available - 0.005) * GIB)
        seqs = self.flag("max_num_seqs") or (1024 if (self.figure("max_num_batched_tokens") or 2048) >= 8192 else 256)
        return f" --max-num-seqs {blocks}" if 0 < blocks < seqs else ""

    def oom_stage(self) -> str:
        text = "\n".join(self.rows)
        return "request" if "startup complete" in text else _stage(self.rows) if _stage(self.rows) != "unknown" else "load or first batches"

    # --- mends ---------------------------------------------------------------------------------------------------------
    def too_long(self) -> str:
        """vLLM's own estimate where it is logged, else the law's; and the utilization that would keep the length."""
        available, need, pool = self.number("available"), self.number("need"), self.pool
        said = re.search(r"estimated maximum model length is (\d+)", " ".join(self.rows))
        best = int(said[1]) if said else pool.longest((available - 0.005) * GIB, int(self.number("length"))) if pool else 0
        first = f"--max-model-len {best}{self.seqs_that_fit(available, pool)}" if best else "a shorter --max-model-len"
        higher = self.utilization(need - available + 0.01)
        return first + (f" (or, to keep {int(self.number('length'))}: --gpu-memory-utilization {higher:.2f}{self.seqs_that_fit(need, pool)})" if higher else "")

    def no_memory(self) -> str:
        """The smallest utilization whose pool holds one full-length request."""
        available, pool = self.figure("available_kv_gib"), self.pool
        length = self.figure("max_model_len") or (self.shape.max_position if self.shape else None)
        other = "smaller or quantized weights, fewer --max-num-seqs, or --enforce-eager"
        if available is None or pool is None or not length:
            return f"raise --gpu-memory-utilization while memory is free; else {other}"
        need = pool.need(length) * pool.pool_block_bytes / GIB
        higher = self.utilization(need - available + 0.01)
        if higher is None:
            return f"no utilization up to 0.97 leaves the {need:.2f} GiB of one request: {other}, or a larger card"
        gained = available + (higher - self.flag("gpu_memory_utilization", 0.92)) * self.total()[0]
        return f"--gpu-memory-utilization {higher:.2f}{self.seqs_that_fit(gained, pool)}"

    def total(self) -> tuple[float, float] | None:
        """(least, most) GiB of the card that the log allows; None where nothing tells."""
        if self.figure("total_gib"):
            return self.figure("total_gib") - 0.005, self.figure("total_gib") + 0.005
        estimate, equal = self.figure("cuda_graph_estimate_gib"), re.search(r"utilization=([\d.]+) is equivalent to --gpu-memory-utilization=([\d.]+)", " ".join(self.rows))
        available, used = self.figure("available_kv_gib"), self.flag("gpu_memory_utilization", 0.92)
        if self.shape is not None and available is not None and self.figure("weights_gib"):
            from qrecipe import overhead

            seqs, tokens = self.flag("max_num_seqs"), self.figure("max_num_batched_tokens") or 2048
            seqs = seqs or (1024 if tokens >= 8192 else 256)
            eager = bool(self.flag("enforce_eager"))
            peak = overhead.transient(self.shape, seqs, tokens, vision=self.shape.has_vision)
            rest = overhead.non_torch(100 if tokens >= 8192 else 24, eager)
            graphs = 0.0 if eager else estimate if estimate is not None else overhead.graphs(self.shape, seqs, tokens)[0].gib
            middle = (available + self.figure("weights_gib") + peak.gib + rest.gib + graphs) / used
            from qrecipe.cards import cards

            near = [c.memory_gib for c in cards() if abs(c.memory_gib - middle) <= (peak.band + rest.band) / used]
            return (min([*near, middle * 0.98]), max([*near, middle * 1.02])) if near else (middle * 0.95, middle * 1.05)
        if estimate and equal and float(equal[1]) > float(equal[2]):
            share = float(equal[1]) - float(equal[2])
            return (estimate - 0.005) / (share + 0.00005), (estimate + 0.005) / max(share - 0.00005, 1e-5)
        return None

    def utilization(self, more_gib: float) -> float | None:
        """The utilization that gives `more_gib` more, rounded up to hundredths; None when unknown or above 0.97."""
        total = self.total()
        if total is None:
            return None
        value = ceil((self.flag("gpu_memory_utilization", 0.92) + more_gib / total[0]) * 100 - 1e-9) / 100
        return value if value <= 0.97 else None

    def not_free(self) -> str:
        free, total = self.number("free"), self.number("total")
        value = floor((free - 0.005) / (total + 0.005) * 100) / 100
        return f"stop the processes that hold the card (nvidia-smi lists them), or --gpu-memory-utilization {value:.2f} (all that is free now; the model must fit into it)"

    def half_seqs(self) -> str:
        return f"--max-num-seqs {max(1, int(self.number('rows')) // 2)}"

    def out_of_memory(self) -> str:
        used = self.flag("gpu_memory_utilization", None)
        lower = f"--gpu-memory-utilization {max(0.05, floor((used - 0.05) * 100 + 1e-9) / 100):.2f}" if isinstance(used, float) else "a lower --gpu-memory-utilization"
        if "load" in self.oom_stage() and "graphs" not in self.oom_stage():
            return "stop what else runs on the card (nvidia-smi); if the weights themselves are too large: a quantized checkpoint, --tensor-parallel-size 2, or a larger card"
        return f"stop what else runs on the card (nvidia-smi); then {lower}, fewer --max-num-seqs, or a smaller --max-num-batched-tokens"

    def own_cache(self) -> str | None:
        """Only where a compiled model was at work and the start was text-only, as far as the log tells."""
        text_only = self.log is None or self.flag("limit_mm_per_prompt") or self.flag("language_model_only")
        if not text_only or (len(self.rows) > 50 and not any("aot_compile" in r or "_dynamo" in r for r in self.rows)):
            return None
        return "VLLM_CACHE_ROOT=$HOME/.cache/vllm-text-only (a cache folder of its own), or VLLM_DISABLE_COMPILE_CACHE=1"

    def divisors(self) -> str:
        heads = int(self.number("heads"))
        fit = [n for n in range(1, 17) if heads % n == 0]
        best = max(n for n in fit if n <= self.number("tp"))
        return f"--tensor-parallel-size {best} ({heads} heads divide by {', '.join(map(str, fit))})"

    def more_items(self) -> str:
        kind, limit = self.values["kind"], int(self.number("limit"))
        return f"""--limit-mm-per-prompt '{{"{kind}": {max(4, 2 * limit)}}}'""" + (" (0 had switched it off)" if limit == 0 else "")

    def fewer_tokens(self) -> str:
        room = int(self.number("limit") - self.number("input"))
        if room > 0:
            return f"max_tokens={room}"
        return f"shorten the prompt by {1 - room} tokens or more, or start with a larger --max-model-len"


MENDS = {name: getattr(Case, name) for name in ("too_long", "no_memory", "not_free", "half_seqs", "out_of_memory", "own_cache", "divisors", "more_items", "fewer_tokens")}


def _read(rows: list[str]) -> Any:
    from qrecipe.startup_log import read_log

    try:
        return read_log([r + "\n" for r in rows])
    except RecipeError:
        return None
