"""Nights side by side: `qrecipe report DIR…` reads run folders, and marks what stands out of the spread of the nights before.

The spread of a figure is three robust standard deviations (1.4826 × the median distance from the median) or 2 % of the
median, whichever is more; with fewer than eight nights before it is at least the largest distance seen. With fewer than
three nothing is marked. A mark is a regression when the figure moved to its worse side by more than the bound.
"""

import html
import json
import re
from dataclasses import asdict, dataclass, field
from datetime import datetime
from pathlib import Path
from statistics import median

from .errors import BadInput
from .judge import read_record
from .paths import write_whole

FORMAT = 2  # of run.json
FEWEST, FEW = 3, 8  # nights before, for any mark and for a spread that a single night cannot widen
WORSE = (  # what the figure and its unit say of the side that is worse: +1 is up, -1 is down
    (r"one request|memory held|weights", 1), (r"at once$| requests at once|KV cache|, times$", -1),
    (r"/s$", -1), (r", (s|ms|GiB)$", 1),
)  # fmt: skip
SETTING = ("engine", "device", "weights")  # nights that differ in these are not held against each other
IDENTITY = ("model revision", "model shards_sha256", "model name", "lock_sha256", "versions")  # told before any figure


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


@dataclass
class Row:
    """One figure over all nights. `mark` is "", "changed", "better" or "regression"; `change` a share of the median before."""

    figure: str
    values: list[float | None]
    median: float | None = None
    spread: float | None = None
    change: float | None = None
    mark: str = ""


def read_night(folder: Path) -> Night | str:
    """The run in this folder, or a sentence that says why there is none. Reads what can be read and notes what cannot."""
    file = folder / "run.json"
    run, notes = read_record(file), []
    if not isinstance(run.get("chapters"), list):
        records = [read_record(p) for p in sorted(folder.glob("[0-9][0-9]_*.json"))]
        records = [r for r in records if isinstance(r.get("measured"), dict) and r.get("chapter")]
        what = "damaged" if file.is_file() and not run else "of something else" if run else "missing"
        if not records or run:
            return f"{folder}: {'run.json is ' + what if folder.is_dir() else 'there is no such folder'}; left out"
        notes.append(f"run.json is {what}: the {len(records)} chapters that wrote their own JSON are read")
        run = {k: records[-1].get(k) for k in (*SETTING, "versions", "model", "date")} | {"format": FORMAT}
        run["chapters"] = [
            {"name": r["chapter"], "status": "passed", "seconds": r.get("seconds"), "measured": r["measured"]}
            for r in records
        ]
    if run.get("format") != FORMAT:
        notes.append(f"format {run.get('format')} (this version writes {FORMAT}): what it lacks is left empty")
    model, server = _dict(run.get("model")), _dict(run.get("server"))
    when = run.get("date")
    if not _time(when):
        when = (
            datetime.fromtimestamp(file.stat().st_mtime if file.is_file() else 0)
            .astimezone()
            .isoformat(timespec="seconds")
        )
        notes.append("its date is missing: the file's is taken")
    parts = {f"model {k}": v for k, v in model.items()} | {k: run.get(k) for k in ("lock_sha256", "versions")}
    night = Night(folder.name, when, {k: run.get(k) for k in SETTING}, {k: parts.get(k) for k in IDENTITY}, notes=notes)
    _figure(night, "server ready after, s", server.get("ready_seconds"))
    for chapter in run["chapters"]:
        if not isinstance(chapter, dict) or not isinstance(chapter.get("name"), str):
            notes.append("a chapter without a name is left out")
            continue
        name = chapter["name"]
        if chapter.get("status") == "failed":
            night.failed.append(name)
            continue
        _figure(night, f"{name}, s", chapter.get("seconds"))
        for key, found in _dict(chapter.get("measured")).items():
            found = _dict(found)
            _figure(night, f"{name}: {key}" + (f", {found['unit']}" if found.get("unit") else ""), found.get("value"))
    return night


def _dict(value) -> dict:
    return value if isinstance(value, dict) else {}


def _figure(night: Night, name: str, value) -> None:
    if isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < 1e300:  # NaN fails here
        night.figures[name] = value


def _time(text) -> datetime | None:
    try:
        return datetime.fromisoformat(text).astimezone()
    except (TypeError, ValueError):
        return None


def compare(folders: list[Path], bound: float = 0.10) -> dict:
    """All nights like the latest one, oldest first: {nights, changed, rows, regressions, notes}. `bound`: share of the median.

    Raises BadInput when no folder holds a run.
    """
    found = []
    for folder in folders:
        inner = sorted(p.parent for p in folder.glob("*/run.json")) if not (folder / "run.json").exists() else []
        found += [read_night(f) for f in inner or [folder]]
    nights = sorted((n for n in found if isinstance(n, Night)), key=lambda n: _time(n.date))
    notes = [n for n in found if isinstance(n, str)]
    if not nights:
        raise BadInput(
            f"no run to report: {'; '.join(notes) or 'no folder named'}; expected folders that qrecipe run has made"
        )
    last = nights[-1]
    for n in nights:
        if n.setting != last.setting:
            other = ", ".join(
                f"{k} {n.setting[k]} instead of {last.setting[k]}" for k in SETTING if n.setting[k] != last.setting[k]
            )
            notes.append(f"{n.name}: not compared ({other})")
    nights = [n for n in nights if n.setting == last.setting]
    notes += [f"{n.name}: {note}" for n in nights for note in n.notes]
    changed = [
        f"{k}: {_short(nights[-2].identity[k])} -> {_short(last.identity[k])}"
        for k in IDENTITY if len(nights) > 1 and nights[-2].identity[k] != last.identity[k]
    ]  # fmt: skip
    names = dict.fromkeys(name for n in nights for name in n.figures)
    rows = [judge_row(Row(name, [n.figures.get(name) for n in nights]), bound) for name in names]
    regressions = [
        f"{r.figure}: {r.values[-1]:.4g} against {r.median:.4g} ± {r.spread:.2g} ({r.change:+.0%})"
        for r in rows
        if r.mark == "regression"
    ]
    regressions += [f"{name} failed" for name in last.failed]
    return {
        "bound": bound, "nights": [asdict(n) for n in nights], "changed": changed, "rows": [asdict(r) for r in rows],
        "regressions": regressions, "notes": notes,
    }  # fmt: skip


def _short(value) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    return re.sub(r"([0-9a-f]{12})[0-9a-f]{20,}", r"\1…", text)


def judge_row(row: Row, bound: float) -> Row:
    """Fill in median, spread, change and mark of the last night's value."""
    *before, last = row.values
    before = [v for v in before if v is not None]
    if last is None or not before:
        return row
    middle = median(before)
    far = [abs(v - middle) for v in before]
    row.median, row.spread = (
        middle,
        max(3 * 1.4826 * median(far), 0.02 * abs(middle), max(far) if len(before) < FEW else 0.0),
    )
    row.change = (last - middle) / abs(middle) if middle else None
    if len(before) >= FEWEST and abs(last - middle) > row.spread:
        side = next((s for words, s in WORSE if re.search(words, row.figure)), 0)
        worse = (last - middle) * side > 0
        large = row.change is None or abs(row.change) > bound
        row.mark = "changed" if not side or (worse and not large) else "regression" if worse else "better"
    return row


def plot(row: dict) -> str:
    """The figure over the nights as SVG: the spread as a band, the median as a line, the last night as a large dot."""
    points = [(i, v) for i, v in enumerate(row["values"]) if v is not None]
    middle, spread = row["median"], row["spread"] or 0.0
    ends = [v for _, v in points] + ([middle - spread, middle + spread] if middle is not None else [])
    low, high = min(ends), max(ends)
    width, height, step = 180, 52, 164 / max(1, len(row["values"]) - 1)

    def y(value: float) -> float:
        return 26.0 if high == low else 46 - 40 * (value - low) / (high - low)

    band = ""
    if middle is not None:
        top, bottom = y(middle + spread), y(middle - spread)
        band = f'<rect x="0" y="{top:.1f}" width="{width}" height="{max(1, bottom - top):.1f}" fill="#cfe3f1"/><path d="M0 {y(middle):.1f}H{width}" stroke="#0072b2" stroke-dasharray="4 3"/>'
    line = "M" + "L".join(f"{8 + i * step:.1f} {y(v):.1f}" for i, v in points)
    color = {"regression": "#a3261b", "better": "#00674a", "changed": "#6b5900"}.get(row["mark"], "#1a1a1a")
    dots = "".join(
        f'<circle cx="{8 + i * step:.1f}" cy="{y(v):.1f}" r="{5 if i == len(row["values"]) - 1 else 2.5}" fill="{color if i == len(row["values"]) - 1 else "#555"}"/>'
        for i, v in points
    )
    label = html.escape(f"{row['figure']}: {', '.join(f'{v:.4g}' for _, v in points)}", quote=True)
    return f'<svg width="{width}" height="{height}" viewBox="0 0 {width} {height}" role="img" aria-label="{label}">{band}<path d="{line}" fill="none" stroke="#555"/>{dots}</svg>'


def write_nights(out: Path, found: dict) -> Path:
    """Write nights.json and nights.html into `out`; returns the page."""
    from .report import page

    shown = found["nights"][-8:]
    head = "".join(
        f"<th>{html.escape(t)}</th>"
        for t in ("figure", "", "over the nights", "before: median ± spread", "last", "change")
    )
    head += "".join(f"<th>{html.escape(n['date'][:16].replace('T', ' '))}</th>" for n in shown[:-1])
    body = ""
    for row in sorted(found["rows"], key=lambda r: ("regression", "changed", "better", "").index(r["mark"])):
        before = f"{_cell(row['median'])} ± {_cell(row['spread'], 2)}" if row["median"] is not None else "-"
        word = {"regression": "failed", "better": "passed", "changed": "skipped"}.get(row["mark"], "")
        cells = [before, _cell(row["values"][-1]), f"{row['change']:+.1%}" if row["change"] is not None else "-"]
        cells = [plot(row), *cells, *map(_cell, row["values"][-8:-1])]
        body += f'<tr><td>{html.escape(row["figure"])}</td><td class="{word}">{row["mark"]}</td>'
        body += "".join(f"<td>{c}</td>" for c in cells) + "</tr>"
    setting = ", ".join(f"{k} {v}" for k, v in found["nights"][-1]["setting"].items())
    parts = [f"<h1>qrecipe: {len(found['nights'])} nights side by side</h1><p>{html.escape(setting)}</p>"]
    for title, lines in (
        ("What it is made of has changed", found["changed"]),
        ("Regressions", found["regressions"] or ["none"]),
        ("What could not be compared", found["notes"]),
    ):
        parts += (
            [f"<h2>{title}</h2><ul>" + "".join(f"<li>{html.escape(line)}</li>" for line in lines) + "</ul>"]
            if lines
            else []
        )
    parts.append(
        f"<h2>Figures</h2><p>A mark: the last night stands out of the spread of the nights before. A regression: to the worse side by more than {found['bound']:.0%}.</p>"
    )
    parts.append(f'<div class="wide nights"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>')
    write_whole(out / "nights.json", json.dumps(found, indent=1, ensure_ascii=False) + "\n")
    write_whole(out / "nights.html", page("qrecipe nights", "".join(parts)))
    return out / "nights.html"


def _cell(value: float | None, digits: int = 4) -> str:
    return (
        "-"
        if value is None
        else f"{value:,.0f}"
        if abs(value) >= 10**digits or value == int(value)
        else f"{value:,.{digits}g}"
    )
