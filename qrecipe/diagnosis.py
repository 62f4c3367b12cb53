"""From the text of a failed start or request to its cause and a mend that can be pasted.

`diagnose(text)` looks for the stable words of data/failures.toml; where memory is the cause the number in the mend is
computed by the capacity law: the value it names starts. A failure that is not in the catalogue is said to be unknown.
"""

import re
import tomllib
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from math import ceil, floor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from qrecipe.cards import cards
from qrecipe.errors import NotCovered, RecipeError
from qrecipe.log_words import is_quiet, message, plain
from qrecipe.memory import GIB, ROUNDING_GIB, Budget, budget, flags_of
from qrecipe.shape import ModelShape, bundled_shapes

TABLE = tomllib.loads((Path(__file__).parent / "data" / "failures.toml").read_text(encoding="utf-8"))
SYMPTOMS = re.compile("|".join(TABLE["symptoms"]), re.IGNORECASE)
ERROR = re.compile(r"(?:[A-Za-z_]\w*\.)*[A-Za-z_]\w*(?:Error|Exception|OutOfMemory)\s*:")
LIMIT = 20_000  # lines kept of a long text: the first and the last


def _rule(row: dict[str, str]) -> SimpleNamespace:
    words = re.sub(r"(?<!\?P)<(\w+)>", r"(?P<\1>-?[\\d,]+(?:\\.\\d+)?)", row["words"])
    tight = re.compile(words.replace(" ", ""), re.IGNORECASE)
    return SimpleNamespace(**row | {"words": re.compile(words, re.IGNORECASE), "tight": tight})


RULES = [_rule(row) for row in TABLE["rule"]]  # each with words, stage, cause, mend, origin


@dataclass(frozen=True)
class Failure:
    """One diagnosed failure: the cause line, when it happened, why, and what mends it."""

    text: str
    stage: str
    cause: str
    mend: str
    known: bool


def diagnose(lines: str | Iterable[str], log: Any = None, shape: ModelShape | None = None) -> Failure | None:
    """The failure in this text (a whole log, an error body, or the error lines alone), or None. log: its StartupLog, for the
    mend (else read from the text where that is a whole log). shape: the model's, else found by the name in the log."""
    rows = lines.splitlines() if isinstance(lines, str) else [str(x) for x in lines]
    rows = rows if len(rows) <= 2 * LIMIT else rows[:LIMIT] + rows[-LIMIT:]
    rows = [plain(r)[:4000].rstrip() for r in rows]
    end = next((i for i, r in enumerate(rows) if "[shutdown]" in r and "shutdown triggered" in r), len(rows))
    loud = [message(r).strip() for r in rows[:end] if not is_quiet(r)]
    tight = re.sub(r"\s", "", "".join(loud))
    for text in (*loud, " ".join(loud), tight):  # at last as one line: it may be wrapped, within a word even
        for rule in RULES:
            if found := (rule.tight if text is tight else rule.words).search(text):
                case = _Case(found, rows, log, shape)
                filled = (x.format_map(case) for x in (rule.stage, rule.cause, rule.mend))
                start, end = (0, 600) if text is tight else (max(0, found.start() - 200), found.end() + 300)
                text = " ".join(loud) if text is tight else text
                text = text if len(text) <= 600 else text[start:end]
                return Failure(text, *filled, True)
    errors = [row[:600] for row in loud if ERROR.match(row)]
    causes = [row for row in errors if not SYMPTOMS.search(row)]  # the others only say that something failed further up
    why = TABLE["unknown"]["cause" if causes else "symptom"]
    return Failure((causes or errors)[0], _stage("\n".join(loud)), *why, False) if errors else None


def _stage(text: str) -> str:
    return next((stage for words, stage in TABLE["stages"].items() if words in text), "unknown")


COMPUTED: dict[str, Callable[[Any], Any]] = {  # what a text may name: from the other values of the case
    "free_share": lambda c: floor((float(c["free"]) - ROUNDING_GIB) / (float(c["total"]) + ROUNDING_GIB) * 100) / 100,
    "oom_stage": lambda c: _stage(c.text).replace("unknown", "load or first batches"),
    "half_rows": lambda c: max(1, int(c["rows"]) // 2),
    "more_items": lambda c: max(4, 2 * int(c["limit"])),
    "divisors": lambda c: ", ".join(str(n) for n in range(1, 17) if int(c["heads"]) % n == 0),
    "best_tp": lambda c: max((n for n in range(1, int(c["tp"]) + 1) if int(c["heads"]) % n == 0), default=1),
    "over": lambda c: 1 - int(c["short"]),
    "room": lambda c: int(c["limit"]) - int(c["input"]),
    "shorten": lambda c: f"shorten the prompt by {1 - c['room']}",
    "fewer_tokens": lambda c: f"max_tokens={c['room']}" if c["room"] > 0 else c["shorten"],
}


class _Case(dict):
    """What the texts of a rule may name: the words found, and below what is computed from them, the log and the law."""

    def __init__(self, found: re.Match, rows: list[str], log: Any, shape: ModelShape | None):
        values = {k: v.strip() for k, v in found.groupdict().items() if v}
        super().__init__({k: v.replace(",", "") if re.fullmatch(r"-?[\d,.]+", v) else v for k, v in values.items()})
        self.text = "\n".join(rows)
        if log is None and ("non-default args" in self.text or "Available KV cache memory" in self.text):
            from qrecipe.startup_log import read_log

            with suppress(RecipeError):
                log = read_log([r + "\n" for r in rows])
        try:
            self.log, self.shape, self.flags = log, shape, flags_of(log) if log else {}
        except NotCovered:  # the log's figures are good, the law does not hold for it
            self.log, self.shape, self.flags = log, None, {}
        self.share = self.flags.get("gpu_memory_utilization") or 0.92

    def __missing__(self, name: str) -> Any:
        return COMPUTED[name](self) if name in COMPUTED else getattr(self, name)()

    @cached_property
    def start(self) -> Budget | None:
        """The budget of the start, or None where the model is unknown or the log's block size disagrees."""
        if not self.flags:
            return None
        named = Path(str(self.log.flags.get("model") or self.log.flags.get("model_tag") or "")).name if self.log else ""
        if not self.shape and named.lower() not in map(str.lower, bundled_shapes()):
            return None
        try:
            found = budget(self.shape or named, **self.flags)
        except RecipeError:
            return None
        seen = self.log and self.log.attention_block_tokens
        return found if seen in (None, found.attention_block_tokens) else None

    @cached_property
    def total(self) -> float | None:
        """GiB of the card, rather too little: as logged, else of the smallest bundled card whose budget agrees."""
        if self.log is None or self.log.total_gib or self.start is None or self.log.available_kv_gib is None:
            return self.log.total_gib - ROUNDING_GIB if self.log and self.log.total_gib else None
        for card in cards():
            b, seen = budget(self.start.shape, gpu=card, **self.flags), self.log.available_kv_gib
            if abs((b.available_kv_gib or 1e9) - seen) <= b.band_gib.get("available_kv_gib", 0):
                return card.memory_gib
        return None

    def utilization(self, more_gib: float) -> float | None:
        """The utilization that gives `more_gib` more, rounded up to hundredths; None when unknown or above 0.97."""
        value = ceil((self.share + more_gib / self.total) * 100 - 1e-9) / 100 if self.total else 1.0
        return value if value <= 0.97 else None

    def fewer(self, gib: float) -> str:
        """` --max-num-seqs N` where a hybrid model with CUDA graphs would next stumble over too few blocks, else nothing."""
        if self.start is None or not self.start.shape.hybrid or self.flags.get("enforce_eager"):
            return ""
        default = 1024 if (self.flags["max_num_batched_tokens"] or 0) >= 8192 else 256
        blocks, seqs = self.start.pool.blocks((gib - ROUNDING_GIB) * GIB), self.flags.get("max_num_seqs") or default
        return f" --max-num-seqs {blocks}" if 0 < blocks < seqs else ""

    def smaller_share(self) -> float:
        """The utilization lowered by what an allocation lacked, and a hundredth more."""
        free = re.search(r"([\d.]+) ([KMG])iB (?:is )?free", self.text)
        have = float(free[1]) / 1024 ** "GMK".index(free[2]) if free else 0.0
        lacks = float(self["size"]) / 1024 ** "GMK".index(self["unit"][0]) - have
        return round(max(0.05, self.share - 0.01 - ceil(max(0.0, lacks) / float(self["total"]) * 100) / 100), 2)

    def more_cards(self) -> str:
        """The least tensor parallelism with which the start fits; where the model is unknown, twice as much."""
        now = self.flags.get("tensor_parallel_size") or 1
        with suppress(RecipeError, TypeError, AttributeError):
            card = {"gpu_memory_gib": float(self.get("total") or self.total)}
            for tp in (n * now for n in (2, 4, 8)):
                given = card | self.flags | {"tensor_parallel_size": tp}
                b, fewer = budget(self.start.shape, **given), ""
                if not b.fits and b.blocks:
                    b, fewer = budget(b.shape, **given | {"max_num_seqs": b.blocks}), f" --max-num-seqs {b.blocks}"
                if b.fits:
                    return f"--tensor-parallel-size {tp}{fewer}"
        return f"--tensor-parallel-size {2 * now}"

    def out_of_memory(self) -> str:
        """What helps against the failed allocation, by the stage in which it failed."""
        load = f"a quantized checkpoint, {self.more_cards()} or a larger card"
        later = f"--gpu-memory-utilization {self.smaller_share()}, fewer --max-num-seqs, or a smaller --max-num-batched-tokens"
        texts = {"load": load, "unknown": f"while weights load: {load}; later: {later}"}
        return f"stop what else runs on the card (nvidia-smi); {texts.get(_stage(self.text), later)}"

    def shorter(self) -> str:
        """vLLM's own estimate of the length where it is logged, else the law's."""
        said = re.search(r"estimatedmaximummodellengthis(\d+)", "".join(self.text.split()))
        available, best = float(self["available"]), int(said[1]) if said else 0
        if not said and self.start:
            best = self.start.pool.longest((available - ROUNDING_GIB) * GIB, int(self["length"]))
        return f"--max-model-len {best}{self.fewer(available)}" if best else "a shorter --max-model-len"

    def larger_share(self) -> str:
        need = float(self["need"])
        higher, fewer = self.utilization(need - float(self["available"]) + 2 * ROUNDING_GIB), self.fewer(need)
        return f" (or, to keep {self['length']}: --gpu-memory-utilization {higher:.2f}{fewer})" if higher else ""

    def enough_memory(self) -> str:
        """The smallest utilization whose pool holds one full-length request."""
        other = "smaller or quantized weights, fewer --max-num-seqs, or --enforce-eager"
        if not self.total or not self.start:
            return f"raise --gpu-memory-utilization while memory is free; else {other}"
        need = self.start.blocks_per_request * self.start.pool_block_bytes / GIB
        higher = self.utilization(need - self.log.available_kv_gib + 2 * ROUNDING_GIB)
        if higher is None:
            return f"no utilization up to 0.97 leaves the {need:.2f} GiB of one request: {other}, or a larger card"
        fewer = self.fewer(self.log.available_kv_gib + (higher - self.share) * self.total)
        return f"--gpu-memory-utilization {higher:.2f}{fewer}"
