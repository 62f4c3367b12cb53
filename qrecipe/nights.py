"""Nights side by side: `qrecipe report DIR…` reads run folders, and marks what stands out of the spread of the nights before.

The spread of a figure is 2.4 + 14 / (nights - 2) times the distance from the median within which four of five nights lie,
or 2 % of the median, whichever is more: what one quiet night of 500 exceeds where the noise is Gaussian, by a simulation
for 4 to 80 nights before (one of 250 for 3), so that a night of fifty figures is seldom marked for nothing. With fewer than three nights
before nothing is marked. A mark is a regression when the figure moved to its worse side by more than the bound.
"""

import json
import os
import re
from dataclasses import asdict, dataclass, field
from datetime import datetime, timedelta
from pathlib import Path
from statistics import median, quantiles
from typing import Any

from .errors import BadInput
from .paths import read_record, write_whole

FORMAT = 2  # of run.json
FEWEST = 3  # nights before, for any mark
WORSE = (  # what the figure and its unit say of the side that is worse: +1 is up, -1 is down
    (r"one request|memory held|weights", 1), (r"at once$| requests at once|KV cache|, times$", -1),
    (r"/s$", -1), (r", (s|ms|GiB)$", 1),
)  # fmt: skip
SETTING = ("engine", "device", "weights")  # nights that differ in these are not held against each other
IDENTITY = {  # told before any figure: what it is called, where it stands in run.json
    "model revision": ("model", "revision"), "model shards_sha256": ("model", "shards_sha256"),
    "model name": ("model", "name"), "lock_sha256": ("lock_sha256",), "versions": ("versions",),
}  # fmt: skip


@dataclass
class Night:
    """One run: what it was made of, its figures ("05_dissect_request: TTFT, ms" -> number), its failed chapters, and what could not be read."""

    name: str
    date: str
    setting: dict
    identity: dict
    figures: dict[str, float] = field(default_factory=dict)
    failed: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def read_night(folder: Path) -> Night | str:
    """The run in this folder, or a sentence that says why there is none. Reads what can be read and notes what cannot."""
    file, notes = folder / "run.json", []
    run = read_record(file)
    if not isinstance(run.get("chapters"), list):
        records = [read_record(p) for p in sorted(folder.glob("[0-9][0-9]_*.json"))]
        records = [r for r in records if r.get("chapter") and r.get("measured")]
        what = "of something else" if run else "damaged or cannot be read" if file.is_file() else "missing"
        if run or not records:
            why = "a file, and the folder of a run is expected" if folder.exists() else "there is no such folder"
            return f"{folder}: {f'run.json is {what}' if folder.is_dir() else why}; left out"
        notes.append(f"run.json is {what}: the {len(records)} chapters that wrote their own JSON are read")
        chapters = [{"status": "passed"} | r | {"name": r["chapter"]} for r in records]
        run = records[-1] | {"format": FORMAT, "chapters": chapters}
    if run.get("format") != FORMAT:
        notes.append(f"format {run.get('format')} (this version writes {FORMAT}): what it lacks is left empty")
    date = run.get("date")
    if not (told := _time(date)) or told > datetime.now().astimezone() + timedelta(days=1):
        notes.append(f"its date is {'in the future' if told else 'missing'}: the file's is taken")
        written = (file if file.is_file() else folder).stat().st_mtime
        date = datetime.fromtimestamp(written).astimezone().isoformat(timespec="seconds")
    setting, identity = {k: run.get(k) for k in SETTING}, {k: _at(run, *keys) for k, keys in IDENTITY.items()}
    night = Night(folder.name, date, setting, identity, notes=notes)
    figures = {"server ready after, s": _at(run, "server", "ready_seconds")}
    for chapter in run["chapters"]:
        name, measured = _at(chapter, "name"), _at(chapter, "measured")
        if not isinstance(name, str):
            notes.append("a chapter without a name is left out")
        elif chapter.get("status") == "failed":
            night.failed.append(name)
        else:
            figures[f"{name}, s"] = chapter.get("seconds")
            for key, found in measured.items() if isinstance(measured, dict) else ():
                unit = _at(found, "unit")
                figures[f"{name}: {key}" + (f", {unit}" if unit else "")] = _at(found, "value")
    night.figures = {k: v for k, v in figures.items() if type(v) in (int, float) and abs(v) < 1e300}  # NaN fails here
    return night


def _at(record: Any, *keys: str) -> Any:
    """What stands under these keys, None where there is no such thing."""
    for key in keys:
        record = record.get(key) if isinstance(record, dict) else None
    return record


def read_all(folders: list[Path]) -> list[Night | str]:
    """The runs in these folders, each once; the folders of such folders are looked into as well."""
    found: dict[str, Night | str] = {}
    for given in folders:
        inner = [] if os.path.exists(given / "run.json") else sorted(p.parent for p in given.glob("*/run.json"))
        for folder in inner or [given]:
            try:
                found[os.path.realpath(folder)] = read_night(folder)
            except OSError as e:
                found[os.path.realpath(folder)] = f"{folder}: cannot be read ({e.strerror}); left out"
    return list(found.values())


def _time(text: Any) -> datetime | None:
    try:
        return datetime.fromisoformat(text).astimezone()
    except (TypeError, ValueError, OverflowError):
        return None


def compare(folders: list[Path], bound: float = 0.10) -> dict:
    """All nights like the latest one, oldest first: {bound, nights, changed, rows, regressions, notes}. `bound`: share of the median.

    Raises BadInput when no folder holds a run.
    """
    found = read_all(folders)
    notes = [n for n in found if isinstance(n, str)]
    nights = sorted((n for n in found if isinstance(n, Night)), key=lambda n: _time(n.date))
    if not nights:
        raise BadInput(f"no run to report: {'; '.join(notes)}; expected folders that qrecipe run has made")
    last = nights[-1]
    for n in nights:
        if other := [f"{k} {n.setting[k]} instead of {v}" for k, v in last.setting.items() if n.setting[k] != v]:
            notes.append(f"{n.name}: not compared ({', '.join(other)})")
    nights = [n for n in nights if n.setting == last.setting]
    notes += [f"{n.name}: {note}" for n in nights for note in n.notes]
    before = nights[-2].identity if len(nights) > 1 else last.identity
    failed = tuple(last.failed)
    gone = sorted(f for n in nights[-2:-1] for f in n.figures.keys() - last.figures.keys() if not f.startswith(failed))
    notes += (
        [f"{last.name}: {len(gone)} figures of the run before are missing: {'; '.join(gone[:3])} ..."] if gone else []
    )
    served = before["model name"] and last.identity["model name"]  # else one of them had no model to change
    differ = {k: (before[k], v) for k, v in last.identity.items() if before[k] != v}
    changed = [
        f"{k}: {_short(a)} -> {_short(b)}" for k, (a, b) in differ.items() if served or not k.startswith("model ")
    ]
    names = dict.fromkeys(name for n in nights for name in n.figures)
    rows = [judge_row(name, [n.figures.get(name) for n in nights], bound) for name in names]
    regressions = []
    for row in (row for row in rows if row["mark"] == "regression"):
        share = f" ({row['change']:+.0%})" if row["change"] else ""
        before = f"{row['median']:.4g} ± {row['spread']:.2g}"
        regressions.append(f"{row['figure']}: {row['values'][-1]:.4g} against {before}{share}")
    regressions += [f"{name} failed" for name in last.failed]
    return {
        "bound": bound, "nights": [asdict(n) for n in nights], "changed": changed, "rows": rows,
        "regressions": regressions, "notes": notes,
    }  # fmt: skip


def _short(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    return re.sub(r"([0-9a-f]{12})[0-9a-f]{20,}", r"\1…", text)


def judge_row(figure: str, values: list[float | None], bound: float) -> dict:
    """One figure over all nights: median and spread before the last night, its change as a share of that median, and its
    mark, which is "", "changed", "better" or "regression"."""
    row = {"figure": figure, "values": values, "median": None, "spread": None, "change": None, "mark": ""}
    before, last = [v for v in values[:-1] if v is not None], values[-1]
    if last is None or not before:
        return row
    middle = median(before)
    far = [abs(v - middle) for v in before]
    enough = len(before) >= FEWEST
    wide = (2.4 + 14 / (len(before) - 2)) * quantiles(far, n=5, method="inclusive")[3] if enough else max(far)
    spread = max(wide, 0.02 * abs(middle))
    change = (last - middle) / abs(middle) if middle else None
    row |= {"median": middle, "spread": spread, "change": change}
    if enough and abs(last - middle) > spread:
        side = next((s for words, s in WORSE if re.search(words, figure)), 0)
        worse, large = (last - middle) * side > 0, change is None or abs(change) > bound
        row["mark"] = "changed" if not side or (worse and not large) else "regression" if worse else "better"
    return row


def write_nights(out: Path, found: dict) -> Path:
    """Write nights.json and nights.html into `out`; returns the page."""
    from .report import write_page

    write_whole(out / "nights.json", json.dumps(found, indent=1, ensure_ascii=False) + "\n")
    return write_page(out, "nights.html", **found)
