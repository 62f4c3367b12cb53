"""GPU cards: the memory that drivers and PyTorch report, which is less than the number on the box.

`memory_gib` is what vLLM multiplies by `--gpu-memory-utilization`: the total that PyTorch reports. Where only nvidia-smi's
figure has a source, PyTorch's is estimated from it (both are known for five cards: 0.4 to 0.6 GiB less), and `source` says so.
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
    measured: bool = True
    nvidia_smi_mib: int | None = None


@lru_cache(maxsize=1)
def cards() -> list[Card]:
    """All cards that come with the package, smallest first."""
    found = []
    for row in json.loads(DATA.read_text(encoding="utf-8"))["cards"]:
        smi, torch = row.get("nvidia_smi_mib"), row.get("torch_gib")
        memory = torch or round(smi / 1024 - DRIVER_SHARE_GIB, 2) if smi or torch else round(row["nominal_gb"] * 0.98, 2)
        source = row["source"] + ("" if torch else f"; PyTorch's total estimated: nvidia-smi − {DRIVER_SHARE_GIB} GiB" if smi else "")
        found.append(Card(row["name"], memory, row["nominal_gb"], row.get("bandwidth_gbs"), source, bool(smi or torch), smi))
    return sorted(found, key=lambda c: (c.memory_gib, c.name))


def _plain(name: str) -> str:
    return re.sub(r"nvidia|geforce|tesla|[^a-z0-9]", "", name.lower())


def find_card(name: str | Card) -> Card:
    """The card of this name ("RTX 4090 D", "h200", "NVIDIA A10"); BadInput with the nearest names when unknown."""
    if isinstance(name, Card):
        return name
    wanted = _plain(str(name))
    known = {_plain(c.name): c for c in cards()}
    if wanted in known:
        return known[wanted]
    if wanted:
        starts = [c for plain, c in known.items() if plain.startswith(wanted)] or [c for plain, c in known.items() if wanted.startswith(plain) and len(plain) > 2]
        if len(starts) == 1:
            return starts[0]
        inside = [c for plain, c in known.items() if plain.removeprefix("rtx") == wanted]
        if len(inside) == 1:
            return inside[0]
    near = [known[p].name for p in difflib.get_close_matches(wanted, known, 4, 0.4)] or [c.name for c in cards()]
    raise BadInput(f"unknown card {str(name)!r}; nearest: {', '.join(near)}; or give its memory: --gpu-memory GIB")


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
