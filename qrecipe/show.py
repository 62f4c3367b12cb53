"""One house style for what a chapter shows: tables and figures that read in light and dark, in colour and in grey.

Every figure is a `Picture`: a matplotlib Figure on an opaque light card, shown once as the value of its cell, with its
message as title and the same in words as alternative text. pandas is not needed; matplotlib loads on the first figure.
"""

import html
import math
from collections.abc import Mapping, Sequence
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
PARTS = {  # the same part has the same look in every chapter
    "weights": 0, "non-torch": 4, "activation": 1, "CUDA graphs": 3, "KV": 2, "left free": None,
}  # fmt: skip


def _bundle(png: bytes, alt: str, width: int) -> tuple[dict, dict]:
    """A picture for a notebook. JupyterLab drops the alternative text of a PNG, so it gets HTML; executed copies keep the PNG."""
    from base64 import b64encode

    from .show_live import is_live

    data, text = b64encode(png).decode(), {"text/plain": f"Figure: {alt}"}
    if is_live():
        page = (
            f'<img src="data:image/png;base64,{data}" alt="{html.escape(alt)}" width="{width}" style="max-width:100%">'
        )
        return {"text/html": page} | text, {}
    return {"image/png": data} | text, {"image/png": {"width": width, "alt": alt}}


class Photo:
    """A Pillow picture as the value of a cell, with its alternative text."""

    def __init__(self, image: Any, alt: str):
        self.image, self.alt = image, alt

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> tuple[dict, dict]:
        from io import BytesIO

        out = BytesIO()
        self.image.save(out, format="PNG")
        return _bundle(out.getvalue(), self.alt, self.image.width)


_PICTURE: type | None = None


def _figure(height: float, alt: str, width: float = 8.2) -> "Figure":
    """An empty Picture of this size in inches."""
    global _PICTURE
    from matplotlib.figure import Figure

    if _PICTURE is None:

        class Picture(Figure):
            """A matplotlib Figure that shows itself; `alt` says in words what it shows."""

            alt = ""

            def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> tuple[dict, dict]:
                from io import BytesIO

                out = BytesIO()
                self.savefig(out, format="png", dpi=144, facecolor=CARD, metadata={"Software": None})
                return _bundle(out.getvalue(), self.alt, int(self.get_figwidth() * 96))

        _PICTURE = Picture
    figure = _PICTURE(figsize=(width, height), facecolor=CARD, layout="constrained")
    figure.get_layout_engine().set(w_pad=0.12, h_pad=0.08)
    figure.alt = alt
    return figure


def _axes(figure: "Figure", title: str, xlabel: str = "", ylabel: str = "") -> Any:
    ax = _style(figure.subplots(), xlabel, ylabel)
    ax.set_title(title, loc="left", fontsize=11.5, fontweight="bold", color=INK, wrap=True)
    return ax


def _style(ax: Any, xlabel: str = "", ylabel: str = "") -> Any:
    """The house look of one axes: card colour, two spines, ink labels."""
    ax.set_facecolor(CARD)
    for side, spine in ax.spines.items():
        spine.set_visible(side in ("bottom", "left"))
        spine.set_color(INK)
    ax.tick_params(colors=INK, labelsize=9)
    ax.set_axisbelow(True)
    ax.set_xlabel(xlabel, color=INK, fontsize=9.5)
    ax.set_ylabel(ylabel, color=INK, fontsize=9.5)
    return ax


def _legend(figure: "Figure", handles: Sequence[Any], columns: int) -> None:
    figure.legend(
        handles=handles, loc="outside lower left", ncols=columns, frameon=False, fontsize=9, labelcolor=INK,
        handlelength=2.2, handleheight=1.1, columnspacing=1.8, borderaxespad=0.2, borderpad=0.2,
    )  # fmt: skip


def _measured(figure: "Figure") -> "Figure":
    """Say under the figure, and in its alternative text, on what and when its numbers were measured."""
    from datetime import date

    from . import chapter as running

    if chapter := running._current:
        known = f"{chapter.device} · vLLM {chapter.versions.get('vllm', '?')}"
        text = f"{known if chapter.engine != 'attached' else 'the server at base_url'} · {date.today()}"
        middle = figure.axes[len(figure.axes) // 2]
        middle.set_xlabel(f"{middle.get_xlabel()}\n{text}")
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
    for word, index in PARTS.items():
        if word.lower() in label.lower():
            return index
    return position


def part_name(label: str, gib: float | None) -> str:
    """A part's line in the legend; memory that is short is called missing."""
    if gib is None:
        return label
    return f"{label}  {gib:.2f} GiB" if gib >= 0 else f"missing  {-gib:.2f} GiB"


def memory_bar(
    parts: Sequence[Sequence[Any]] | Mapping[str, Sequence[Sequence[Any]]],
    total_gib: float | None = None,
    title: str = "",
    *,
    limit_gib: float | None = None,
    limit_label: str = "gpu-memory-utilization",
) -> "Figure":
    """A card's memory as one bar: parts (label, GiB, …) side by side; several bars from a mapping name -> parts.

    `total_gib` ends the card, `limit_gib` marks the share that vLLM may use. Parts below zero are left out.
    """
    bars = dict(parts) if isinstance(parts, Mapping) else {"": parts}
    end = max([total_gib or 0, *(sum(max(0, p[1] or 0) for p in b) for b in bars.values())]) or 1.0
    labels = list(dict.fromkeys(p[0] for bar in bars.values() for p in bar))
    look = {label: _look_of(label, i) for i, label in enumerate(labels)}
    said = "; ".join(", ".join(f"{p[0]} {p[1]:.2f} GiB" for p in bar if p[1] is not None) for bar in bars.values())
    figure = _figure(1.75 + 0.62 * len(bars), f"{title}. {said}")
    ax = _axes(figure, title, "GiB")
    for row, bar in enumerate(bars.values()):
        left = 0.0
        for label, gib, *_ in bar:
            size = max(0.0, gib or 0.0)
            if size:
                ax.barh(row, size, left=left, height=0.66, **_fill(look[label]))
            if size > 0.085 * end:
                box = {"boxstyle": "round,pad=0.22", "facecolor": CARD, "edgecolor": "none"}
                ax.text(left + size / 2, row, f"{size:.2f}", ha="center", va="center", fontsize=9, color=INK, bbox=box)
            left += size
    if total_gib:
        ax.axvline(total_gib, color=INK, linewidth=1.6)
    if limit_gib:
        ax.axvline(limit_gib, color=INK, linewidth=1.2, linestyle=(0, (4, 2)))
        share = f" {limit_gib / total_gib:.2f}" if total_gib else ""
        ax.text(limit_gib, -0.46, f"{limit_label}{share} ", ha="right", va="bottom", fontsize=8.5, color=INK)
    ax.set_xlim(0, end * 1.015)
    ax.set_ylim(len(bars) - 0.55, -0.75)
    ax.set_yticks(range(len(bars)), list(bars) if any(bars) else [""], color=INK)
    ax.spines["left"].set_visible(False)
    ax.tick_params(axis="y", length=0)
    one = len(bars) == 1
    sizes = {p[0]: p[1] for bar in bars.values() for p in bar}
    named = [part_name(x, sizes[x] if one else None) for x in labels]
    _legend(figure, [_patch(look[x], n) for x, n in zip(labels, named, strict=True)], 3)
    return figure


def stages_bar(
    stages: Sequence | Mapping[str, Sequence], title: str = "Where the seconds of a start go", measured: bool = False
) -> "Figure":
    """A start's stages (name, seconds since the start | None) as one bar; several starts from a mapping name -> stages.

    `measured`: on this device, which is then named.
    """
    starts = dict(stages) if isinstance(stages, Mapping) else {"": stages}
    names = list(dict.fromkeys(name for start in starts.values() for name, _ in start if name != "ready"))
    figure = _figure(1.7 + 0.6 * len(starts), title)
    ax = _axes(figure, title, "seconds since the first line")
    spent: dict[str, list[str]] = {n: [] for n in names}
    said = []
    for row, start in enumerate(starts.values()):
        timed = [(n, t) for n, t in start if t is not None]
        for (name, begin), (_, end) in zip(timed, timed[1:], strict=False):
            ax.barh(row, end - begin, left=begin, height=0.62, **_fill(names.index(name)))
            spent[name].append(f"{end - begin:.0f}")
            said.append(f"{name} {end - begin:.0f} s")
        if timed:
            ax.text(timed[-1][1], row, f" {timed[-1][0]} {timed[-1][1]:.0f} s", va="center", fontsize=9, color=INK)
        else:
            ax.text(0, row, "this log carries no times: " + ", ".join(n for n, _ in start), va="center", fontsize=9)
    figure.alt = f"{title}: {', '.join(said)}"
    ax.set_ylim(len(starts) - 0.5, -0.5)
    ax.set_xlim(0, ax.get_xlim()[1] * 1.12)
    ax.set_yticks(range(len(starts)), list(starts) if any(starts) else [""], color=INK)
    ax.spines["left"].set_visible(False)
    ax.tick_params(axis="y", length=0)
    labels = [f"{n}  {' / '.join(spent[n])} s" if spent[n] else n for n in names]
    _legend(figure, [_patch(i, x) for i, x in enumerate(labels)], 4)
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
    measured: bool = False,
) -> "Figure":
    """Lines over x, told apart by colour, dash and marker. `log`: True for both axes, or "x" or "y".

    `limits` draws horizontal lines (name -> y); a line whose name holds "limit" is drawn as one too. None leaves a gap.
    `measured`: on this device, which is then named.
    """
    figure = _figure(3.7, f"{title}: {', '.join(lines)} over {xlabel}")
    ax = _axes(figure, title, xlabel, ylabel)
    ax.grid(True, color=GRID, linewidth=0.7)
    if log:
        from matplotlib.ticker import FuncFormatter

        plain = FuncFormatter(lambda v, _: f"{v:,.0f}" if v >= 1 else f"{v:g}")
        for axis, name in ((ax.xaxis, "x"), (ax.yaxis, "y")):
            if log is True or log == name:
                getattr(ax, f"set_{name}scale")("log", base=2 if name == "x" else 10)
                axis.set_major_formatter(plain)
                if name == "y":
                    axis.set_minor_formatter(FuncFormatter(lambda v, _: ""))
    for i, (name, values) in enumerate(lines.items()):
        limit = "limit" in name.lower()
        clean = [math.nan if v is None else float(v) for v in values]
        ax.plot(
            x, clean, label=name, color="#6b675c" if limit else COLORS[i % len(COLORS)], linewidth=1.3 if limit else 2,
            linestyle=(0, (4, 2)) if limit else DASHES[i % 4], marker=MARKERS[i % 6] if markers and not limit else None,
            markersize=5,
        )  # fmt: skip
    for name, y in (limits or {}).items():
        ax.axhline(y, color="#6b675c", linewidth=1.2, linestyle=(0, (4, 2)))
        ax.annotate(
            name,
            (0, y),
            xycoords=("axes fraction", "data"),
            xytext=(4, 3),
            textcoords="offset points",
            fontsize=8.5,
            color=INK,
        )
    if log in (False, "x"):
        ax.set_ylim(bottom=min(0, ax.get_ylim()[0]) if min(ax.dataLim.y0, 0) < 0 else 0)
    if len(lines) > 1:
        _legend(figure, ax.get_legend_handles_labels()[0], 3)
    return _measured(figure) if measured else figure


_ELSEWHERE = {
    "timeline": "show_request",
    "patch_grid": "show_request",
    "one_line": "show_request",
    "memory_svg": "show_live",
    "dashboard": "show_live",
    "distributions": "show_batch",
    "sweep": "show_batch",
}


def __getattr__(name: str) -> Any:
    if name in _ELSEWHERE:
        from importlib import import_module

        return getattr(import_module(f"qrecipe.{_ELSEWHERE[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
