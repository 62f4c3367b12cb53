"""GPU cards: the memory that drivers and PyTorch report, which is less than the number on the box.

`memory_gib` is what vLLM multiplies by `--gpu-memory-utilization`: the total that PyTorch reports. Where only nvidia-smi's
figure has a source, PyTorch's is estimated from it (where both are known it is 0.3 to 2.8 % less), and `source` says so.
"""

from __future__ import annotations

import difflib
import json
import re
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from qrecipe.errors import BadInput

DATA = Path(__file__).parent / "data" / "cards.json"
DRIVER_SHARE_GIB = 0.5  # nvidia-smi total − PyTorch total


@dataclass(frozen=True)
class Card:
    """One GPU. memory_gib: as PyTorch reports it (GiB); nominal_gb: the label (GB); bandwidth_gbs: GB/s by data sheet."""

    name: str
    memory_gib: float
    nominal_gb: int
    bandwidth_gbs: int | None
    source: str
    measured: bool = True  # False: memory_gib is estimated from nvidia-smi's total
    nvidia_smi_mib: int | None = None


@lru_cache(maxsize=1)
def cards() -> list[Card]:
    """All cards that come with the package, smallest first."""
    found = []
    for row in json.loads(DATA.read_text(encoding="utf-8"))["cards"]:
        smi, torch = row.get("nvidia_smi_mib"), row.get("torch_gib")
        memory = torch or round(smi / 1024 - DRIVER_SHARE_GIB, 2)
        source = row["source"] + ("" if torch else f"; PyTorch's total estimated: nvidia-smi − {DRIVER_SHARE_GIB} GiB")
        found.append(Card(row["name"], memory, row["nominal_gb"], row.get("bandwidth_gbs"), source, torch is not None, smi))
    return sorted(found, key=lambda c: (c.memory_gib, c.name))


def _words(name: str) -> frozenset[str]:
    """The telling words of a card's name: "NVIDIA A100-SXM4-80GB" → a100, 80gb."""
    text = re.sub(r"(\d+) +gb\b", r"\1gb", name.lower())
    text = re.sub(r"\b(\d{4})(ti|d|super)\b", r"\1 \2", text.replace("rtx", " ").replace("geforce", " "))
    noise = {"nvidia", "amd", "instinct", "tesla", "gpu", "gb", "sxm", "sxm2", "sxm4", "sxm5", "pcie", "hbm3", "hbm3e", "generation", "edition", "workstation", "server"}
    return frozenset(w for w in re.findall(r"[a-z0-9]+", text) if w not in noise)


def find_card(name: str | Card) -> Card:
    """The card of this name ("RTX 4090 D", "h200", "NVIDIA A100-SXM4-80GB"); BadInput with the nearest names when unknown."""
    if isinstance(name, Card):
        return name
    wanted = _words(str(name))
    known = {c: _words(c.name) for c in cards()}
    for match in (lambda w: w == wanted, lambda w: w - _sizes(w) == wanted - _sizes(wanted), lambda w: bool(wanted) and wanted <= w):
        found = [c for c, w in known.items() if match(w) and (not _sizes(wanted) or not _sizes(w) or _sizes(w) == _sizes(wanted))]
        if len(found) == 1:
            return found[0]
        if found:
            raise BadInput(f"card {str(name)!r} may be {' or '.join(c.name for c in found)}; name one of them")
    flat = {"".join(sorted(w)): c.name for c, w in known.items()}
    near = [flat[p] for p in difflib.get_close_matches("".join(sorted(wanted)), flat, 4, 0.4)] or [c.name for c in cards()]
    raise BadInput(f"unknown card {str(name)!r}; nearest: {', '.join(near)}; or give its memory: --gpu-memory GIB")


def _sizes(words: frozenset[str]) -> frozenset[str]:
    return frozenset(w for w in words if re.fullmatch(r"\d+gb", w))


def parse_size(text: str | int | float, what: str = "memory") -> float:
    """A size in GiB: 24, "24", "24GiB" are GiB; "24GB" is 24 · 10⁹ B; MiB, MB, TiB, TB, K and M likewise. BadInput otherwise."""
    found = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([kmgt]?)(i?)(b?)\s*", str(text), re.IGNORECASE)
    value = 0.0
    if found:
        power = " kmgt".index(found[2].lower() or "g")
        decimal = found[4] and not found[3] and found[2]
        value = float(found[1]) * (1000**power if decimal else 1024**power) / 1024**3
    if not found or not 0 < value < 10**6:
        raise BadInput(f"{what} is {text!r}; a size such as 24, 24GiB (2^30 B) or 24GB (10^9 B) is expected")
    return value
