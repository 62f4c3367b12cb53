"""GPU cards: the memory that PyTorch reports, which vLLM multiplies by --gpu-memory-utilization; less than the label.

Where only nvidia-smi's figure has a source, PyTorch's is estimated from it (0.3 to 2.8 % less where both are known).
"""

import difflib
import json
import re
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from qrecipe.checks import check_number
from qrecipe.errors import BadInput
from qrecipe.units import quantity

DATA = json.loads((Path(__file__).parent / "data" / "cards.json").read_text(encoding="utf-8"))
DRIVER_SHARE_GIB = 0.5  # nvidia-smi total − PyTorch total
NOISE = (
    r"\b(nvidia|amd|instinct|tesla|gpu|geforce|rtx|sxm\d?|pcie|hbm3e?|generation|edition|workstation|server|\d+gb)\b"
)


@dataclass(frozen=True)
class Card:
    """One GPU. memory_gib: as PyTorch reports it (GiB); nominal_gb: the label (GB); measured: False if estimated."""

    name: str
    memory_gib: float
    nominal_gb: int
    source: str
    measured: bool = True
    bfloat16: bool = True  # below compute capability 8.0 there is none
    nvidia_smi_mib: int | None = None


@lru_cache(maxsize=1)
def cards() -> list[Card]:
    """All cards that come with the package, smallest first."""
    found = []
    for row in DATA["cards"]:
        smi, torch = row.get("nvidia_smi_mib"), row.get("torch_gib")
        source = row["source"] + ("" if torch else f"; PyTorch's total estimated: nvidia-smi − {DRIVER_SHARE_GIB} GiB")
        memory = torch or round(smi / 1024 - DRIVER_SHARE_GIB, 2)
        found.append(
            Card(row["name"], memory, row["nominal_gb"], source, torch is not None, row.get("bfloat16", True), smi)
        )
    return sorted(found, key=lambda c: (c.memory_gib, c.name))


def _words(name: str) -> tuple[frozenset[str], int | None]:
    """The telling words of a card's name and the size in it: "NVIDIA A100-SXM4-80GB" → a100, 80."""
    text = re.sub(r"(\d+) gb\b", r"\1gb", name.lower().replace("rtx", " rtx "))
    text = re.sub(r"\b(\d{4})(ti|d|super)\b", r"\1 \2", text)
    size = re.search(r"\b(\d+)gb\b", text)
    return frozenset(re.findall(r"[a-z0-9]+", re.sub(NOISE, " ", text))), int(size[1]) if size else None


def find_card(name: str | Card) -> Card:
    """The card of this name ("RTX 4090 D", "h200", "NVIDIA A100-SXM4-80GB"); BadInput with the nearest when unknown."""
    if isinstance(name, Card):
        return name
    wanted, size = _words(str(name))
    known = {c: _words(c.name)[0] for c in cards() if size in (None, c.nominal_gb)}
    exact = [c for c, words in known.items() if words == wanted]
    found = exact or [c for c, words in known.items() if wanted and wanted <= words]
    if len(found) == 1:
        return found[0]
    names, what = [c.name for c in found or cards()], "ambiguous" if found else "unknown"
    near = ", ".join(difflib.get_close_matches(str(name), names, 4, 0.1 if found else 0.4) or names)
    several = "one card is named here, several by --tensor-parallel-size; " * bool(
        re.match(r"\s*\d+\s*[x×*]", str(name))
    )
    raise BadInput(f"{what} card {str(name)!r}; {several}nearest: {near}")


def parse_size(text: str | int | float, what: str = "memory") -> float:
    """A size in GiB: 24, "24", "24GiB" are GiB; "24GB" is 24 · 10⁹ B; MiB, MB, TiB, TB likewise, in any case."""
    try:
        gib = quantity(str(text).lower(), "GiB").base / 2**30
    except BadInput:
        raise BadInput(f"{what} is {text!r}; a size such as 24, 24GiB (2^30 B) or 24GB (10^9 B) is expected") from None
    return check_number(gib, what, 0.001, 10**5, float, " GiB")
