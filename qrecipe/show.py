"""One house style for what a chapter shows: tables and figures that read in light and dark, in colour and in grey.

Every figure is a matplotlib Figure on an opaque light card, shown once as the value of its cell, with its message as title
and the same in words as alternative text. matplotlib loads on the first figure.
"""

import html
import math
from base64 import b64encode
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from io import BytesIO
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from .show_table import Table, number, table  # noqa: F401 - shown as qrecipe.show.table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

INK, CARD, GRID = "#1b1b1b", "#fbfaf6", "#d9d6cc"
# Okabe and Ito's colours, which the common kinds of colour blindness tell apart, each with a hatch for grey print
COLORS = ["#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#F0E442", "#999999"]
HATCHES = ["", "///", "...", "xxx", "\\\\\\", "++", "oo", "--"]
DASHES = ["-", "--", "-.", ":"]
MARKERS = ["o", "s", "^", "D", "v", "P"]
LIMIT = {"color": "#6b675c", "linewidth": 1.3, "linestyle": (0, (4, 2))}
PARTS = {  # the same part has the same look in every chapter
    "weights": 0, "non-torch": 4, "activation": 1, "CUDA graphs": 3, "KV": 2, "left free": None,
}  # fmt: skip


def _bundle(save: Callable[[BytesIO], Any], alt: str, width: int) -> tuple[dict, dict]:
    """The PNG that `save` writes, for a notebook. JupyterLab drops its alternative text, so it gets HTML; executed copies keep the PNG."""
    from . import chapter as running

    out = BytesIO()
    save(out)
    data, text = b64encode(out.getvalue()).decode(), {"text/plain": f"Figure: {alt}"}
    if not running.attended():
        return {"image/png": data} | text, {"image/png": {"width": width, "alt": alt}}
    look = f'alt="{html.escape(alt)}" width="{width}" style="max-width:100%"'
    return {"text/html": f'<img src="data:image/png;base64,{data}" {look}>'} | text, {}


@dataclass(frozen=True)
class Photo:
    """A Pillow picture as the value of a cell, with its alternative text."""

    image: Any
    alt: str

    def _repr_mimebundle_(self, **_: Any) -> tuple[dict, dict]:
        return _bundle(partial(self.image.save, format="PNG"), self.alt, self.image.width)


def _figure(height: float, alt: str, width: float = 8.2) -> "Figure":
    """An empty figure of this size in inches; `alt`, which may still be changed, says in words what it shows."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), facecolor=CARD, layout="constrained", dpi=144)
    figure.get_layout_engine().set(w_pad=0.12, h_pad=0.08)
    figure.alt = alt
    save = partial(FigureCanvasAgg(figure).print_png, metadata={"Software": None})  # savefig draws twice
    figure._repr_mimebundle_ = lambda **_: _bundle(save, figure.alt, int(width * 96))
    return figure


def _axes(figure: "Figure", title: str, xlabel: str = "", ylabel: str = "") -> Any:
    ax = _style(figure.subplots(), xlabel, ylabel)
    ax.set_title(title, loc="left", fontsize=11.5, fontweight="bold", color=INK, wrap=True)
    return ax


def _style(ax: Any, xlabel: str = "", ylabel: str = "") -> Any:
    """The house look of one axes: card colour, two spines, ink labels."""
    ax.set(facecolor=CARD, axisbelow=True)
    ax.spines[["top", "right"]].set_visible(False)
    ax.spines[:].set_color(INK)
    ax.tick_params(colors=INK, labelsize=9)
    ax.set_xlabel(xlabel, color=INK, fontsize=9.5)
    ax.set_ylabel(ylabel, color=INK, fontsize=9.5)
    return ax


def _legend(figure: "Figure", handles: Sequence[Any], columns: int) -> None:
    figure.legend(
        handles=handles, loc="outside lower left", ncols=columns, frameon=False, fontsize=9, labelcolor=INK,
        handlelength=2.2, handleheight=1.1, columnspacing=1.8, borderaxespad=0.2, borderpad=0.2,
    )  # fmt: skip


def _measured(figure: "Figure", text: str | bool = True) -> "Figure":
    """Say under the figure, and in its alternative text, on what and when its numbers were measured: `text`, or True for here and today."""
    from datetime import date
    from textwrap import fill

    from . import chapter as running

    if text is True and (chapter := running._current):
        known = f"{chapter.device} · vLLM {chapter.versions.get('vllm', '?')}"
        text = f"{known if chapter.engine != 'attached' else 'the server at base_url'} · {date.today()}"
    if text is not True:
        middle = figure.axes[len(figure.axes) // 2]
        middle.set_xlabel(f"{middle.get_xlabel()}\n{fill(text, 90)}")
        figure.alt += f" ({text})"
    return figure


def _patch(index: int | None, label: str) -> Any:
    from matplotlib.patches import Patch

    return Patch(**_fill(index), label=label)


def _fill(index: int | None) -> dict[str, Any]:
    if index is None:
        return {"facecolor": "#ffffff", "edgecolor": "#8a877c", "linewidth": 0.8}
    i = index % len(COLORS)
    return {"facecolor": COLORS[i], "hatch": HATCHES[i], "edgecolor": CARD, "linewidth": 0.6}


def _look_of(label: str, position: int) -> int | None:
    return next((index for word, index in PARTS.items() if word.lower() in label.lower()), position)


def part_name(label: str, gib: float | None) -> str:
    """A part's line in the legend; memory that is short is called missing."""
    if gib is None:
        return label
    return f"{label}  {gib:.2f} GiB" if gib >= 0 else f"missing  {-gib:.2f} GiB"


def _rows(ax: Any, names: Sequence[str]) -> Any:
    """The axes as named rows from the top, with room for a line of words over each."""
    ax.set_ylim(len(names) - 0.5, -0.75)
    ax.set_yticks(range(len(names)), names, color=INK)
    ax.spines["left"].set_visible(False)
    ax.tick_params(axis="y", length=0)
    return ax


def _spans(ax: Any, label: str, begins: Sequence[float], lengths: Sequence[float], look: int | None) -> Any:
    """One part of every row's bar, drawn from `begins` over `lengths`."""
    return ax.barh(range(len(begins)), lengths, left=begins, height=0.64, label=label, **_fill(look))


def memory_bar(
    parts: Sequence[Sequence[Any]] | Mapping[str, Sequence[Sequence[Any]]],
    total_gib: float | None = None,
    title: str = "",
    *,
    limit_gib: float | None = None,
) -> "Figure":
    """A card's memory as one bar: parts (label, GiB, …) side by side; several bars from a mapping name -> parts.

    `total_gib` ends the card, `limit_gib` marks the share that vLLM may use. Parts below zero are left out.
    """
    bars = {
        name: {p[0]: p[1] for p in bar} for name, bar in (parts if isinstance(parts, Mapping) else {"": parts}).items()
    }
    labels = list(dict.fromkeys(label for bar in bars.values() for label in bar))
    end = max([total_gib or 0, *(sum(max(0, gib or 0) for gib in bar.values()) for bar in bars.values())]) or 1.0
    said = [
        ", ".join(f"{label} {gib:.2f} GiB" for label, gib in bar.items() if gib is not None) for bar in bars.values()
    ]
    figure = _figure(1.75 + 0.62 * len(bars), f"{title}. {'; '.join(said)}")
    ax = _rows(_axes(figure, title, "GiB"), list(bars))
    left = [0.0] * len(bars)
    box = {"boxstyle": "round,pad=0.22", "facecolor": CARD, "edgecolor": "none"}
    for i, label in enumerate(labels):
        sizes = [max(0.0, bar.get(label) or 0.0) for bar in bars.values()]
        name = part_name(label, bars[""][label] if "" in bars else None)
        drawn = _spans(ax, name, left, sizes, _look_of(label, i))
        texts = [f"{size:.2f}" if size > 0.085 * end else "" for size in sizes]
        ax.bar_label(drawn, texts, label_type="center", fontsize=9, color=INK, bbox=box)
        left = [a + b for a, b in zip(left, sizes, strict=True)]
    if total_gib:
        ax.axvline(total_gib, color=INK, linewidth=1.6)
    if limit_gib:
        ax.axvline(limit_gib, **LIMIT)
        words = "gpu-memory-utilization" + (f" {limit_gib / total_gib:.2f} " if total_gib else " ")
        ax.text(limit_gib, -0.46, words, ha="right", va="bottom", fontsize=8.5, color=INK)
    ax.set_xlim(0, end * 1.015)
    _legend(figure, ax.get_legend_handles_labels()[0], 3)
    return figure


def stages_bar(
    stages: Sequence | Mapping[str, Sequence], title: str = "Where the seconds of a start go", measured: bool = False
) -> "Figure":
    """A start's stages (name, seconds since the start | None) as one bar; several starts from a mapping name -> stages.

    `measured`: on this device, which is then named.
    """
    starts = stages if isinstance(stages, Mapping) else {"": stages}
    figure = _figure(1.75 + 0.62 * len(starts), title)
    ax = _rows(_axes(figure, title, "seconds since the first line"), list(starts))
    spans: list[dict] = []  # of each row: stage -> (begin, length)
    for row, start in enumerate(starts.values()):
        timed = [(name, t) for name, t in start if t is not None]
        spans.append({name: (begin, end - begin) for (name, begin), (_, end) in pairwise(timed)})
        name, at = timed[-1] if timed else ("", 0)
        words = f"{name} {at:.0f} s" if timed else f"this log carries no times: {', '.join(n for n, _ in start)}"
        ax.text(at, row, f" {words}", va="center", fontsize=9, color=INK)
    for i, name in enumerate(dict.fromkeys(n for start in starts.values() for n, _ in start if n != "ready")):
        begins, lengths = zip(*(row.get(name, (0, 0)) for row in spans), strict=True)
        told = " / ".join(f"{row[name][1]:.0f}" for row in spans if name in row)
        _spans(ax, f"{name}  {told} s" if told else name, begins, lengths, i)
    ax.set_xlim(0, ax.get_xlim()[1] * 1.12)
    _legend(figure, ax.get_legend_handles_labels()[0], 4)
    figure.alt = f"{title}: {', '.join(f'{name} {s:.0f} s' for row in spans for name, (_, s) in row.items())}"
    return _measured(figure) if measured else figure


def line_plot(
    x: Sequence[float],
    lines: Mapping[str, Sequence[float | None]],
    *,
    title: str,
    xlabel: str,
    ylabel: str,
    log: bool | str = False,
    limits: Mapping[str, float] | None = None,
    markers: bool = True,
    measured: bool | str = False,
) -> "Figure":
    """Lines over x, told apart by colour, dash and marker. `log`: True for both axes, or "x" or "y".

    `limits` draws horizontal lines (name -> y); a line whose name holds "limit" is drawn as one too. None leaves a gap.
    `measured`: True on this device, which is then named; or the words that name another.
    """
    figure = _figure(3.7, f"{title}: {', '.join(lines)} over {xlabel}")
    ax = _axes(figure, title, xlabel, ylabel)
    ax.grid(True, color=GRID, linewidth=0.7)
    for name in "xy":
        if log in (True, name):
            getattr(ax, f"set_{name}scale")("log", base=2 if name == "x" else 10)
            axis = getattr(ax, f"{name}axis")
            axis.set_major_formatter("{x:,.10g}")
            axis.set_minor_formatter("")
    for i, (name, values) in enumerate(lines.items()):
        clean = [math.nan if v is None else float(v) for v in values]
        look = {"color": COLORS[i % 8], "linestyle": DASHES[i % 4], "linewidth": 2, "markersize": 5}
        look |= {"marker": MARKERS[i % 6]} if markers else {}
        ax.plot(x, clean, label=name, **(LIMIT if "limit" in name.lower() else look))
    for name, y in (limits or {}).items():
        ax.axhline(y, label=name, **LIMIT)
    if log in (False, "x"):
        whole = all(v is None or float(v).is_integer() for values in lines.values() for v in values)
        ax.yaxis.get_major_locator().set_params(integer=whole)
        ax.set_ylim(bottom=min(0, ax.get_ylim()[0]) if min(ax.dataLim.y0, 0) < 0 else 0)
    if len(lines) > 1 or limits:
        _legend(figure, ax.get_legend_handles_labels()[0], 3)
    return _measured(figure, measured) if measured else figure


def __getattr__(name: str) -> Any:
    """The figures of other modules, which take the house style from here."""
    for module in ("show_request", "show_live"):
        if hasattr(found := import_module(f"qrecipe.{module}"), name):
            return getattr(found, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
