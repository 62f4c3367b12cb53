"""Two figures: what sampling parameters do to one distribution, and a sweep over concurrency with its predicted limit."""

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from .show import CARD, COLORS, DASHES, GRID, INK, MARKERS, _figure, _legend, _measured, _patch, _style

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def _panels(title: str, rows: int, columns: int, size: tuple[float, float], **shared: bool) -> tuple["Figure", list]:
    """A figure of rows x columns axes under one title; `size` in inches, height first."""
    figure = _figure(size[0], title, size[1])
    figure.suptitle(title, x=0.015, ha="left", fontsize=11.5, fontweight="bold", color=INK)
    return figure, list(figure.subplots(rows, columns, squeeze=False, **shared).flat)


def distributions(
    tokens: Sequence[str], panels: Mapping[str, tuple[Sequence[float], Sequence[float]]], *, title: str
) -> "Figure":
    """Small bar charts of the same tokens, three a row: name -> (probabilities before, after). Before is an outline."""
    from matplotlib.lines import Line2D

    rows, places = -(-len(panels) // 3), range(len(tokens))
    figure, axes = _panels(title, rows, 3, (0.9 + rows * (0.75 + 0.24 * len(tokens)), 8.2), sharex=True, sharey=True)
    said = []
    for ax, (name, (before, after)) in zip(axes, panels.items(), strict=False):
        _style(ax, "probability" if len(said) >= len(panels) - 3 else "")
        ax.barh(places, after, height=0.72, facecolor=COLORS[0], edgecolor=CARD)
        ax.barh(places, before, height=0.72, facecolor="none", edgecolor=INK, linewidth=1.1, linestyle=(0, (2, 1.5)))
        ax.set_title(name, loc="left", fontsize=9.5, color=INK)
        ax.set_xlim(0, 1)
        ax.set_yticks(places, [repr(t) for t in tokens], fontsize=8.5)
        ax.set_ylim(len(tokens) - 0.4, -0.6)
        ax.grid(True, axis="x", color=GRID, linewidth=0.7)
        possible = sum(p > 0 for p in after)
        said.append(f"{name}: {max(after):.0%} for the likeliest, {possible} of {len(tokens)} possible")
    for ax in axes[len(panels) :]:
        ax.set_visible(False)
    dashed = Line2D([], [], color=INK, linewidth=1.1, linestyle=(0, (2, 1.5)), label="without it")
    _legend(figure, [_patch(0, "with the parameter"), dashed], 2)
    figure.alt = f"{title}. " + "; ".join(said)
    return figure


def _target(ax: Any, value: float) -> None:
    """A line across the axes, or a word at their top where it lies far above the curves and would flatten them."""
    look = {"fontsize": 8.5, "color": INK, "in_layout": False}
    if value > 1.5 * (top := ax.get_ylim()[1]):
        ax.set_ylim(0, 1.12 * top)  # room for the word
        ax.text(0.02, 0.99, f"target {value:g} lies above", transform=ax.transAxes, ha="left", va="top", **look)
        return
    ax.axhline(value, color=COLORS[5], linewidth=1.2, linestyle=":")
    ax.set_ylim(0, max(ax.get_ylim()[1], 1.08 * value))
    ax.text(1, value, f"target {value:g}", transform=ax.get_yaxis_transform(), ha="right", va="bottom", **look)


def sweep(
    concurrency: Sequence[int], panels: Mapping[str, Mapping[str, Sequence[float | None]]], *, title: str, limit: float | None = None,
    limit_name: str = "predicted limit", targets: Mapping[str, float] | None = None,
) -> "Figure":  # fmt: skip
    """Panels side by side over concurrency: the panel's name (its y axis) -> line -> values. `limit` is a concurrency,
    drawn upright in each; `targets` maps a panel's name to a value drawn across it."""
    figure, axes = _panels(title, 1, len(panels), (3.9, 3.6 * len(panels)))
    figure.alt = f"{title}: {', '.join(panels)} over concurrency {list(concurrency)}"
    handles: dict = {}
    for ax, (name, lines) in zip(axes, panels.items(), strict=True):
        _style(ax, "requests at once (concurrency)", name)
        first = len(handles.keys() - lines.keys() - {"limit"})
        for i, (label, values) in enumerate(lines.items(), first):
            clean = [math.nan if v is None else float(v) for v in values]
            look = {"color": COLORS[i % 8], "linestyle": DASHES[i % 4], "marker": MARKERS[i % 6], "markersize": 5}
            handles.setdefault(label, ax.plot(concurrency, clean, label=label, linewidth=2, **look)[0])
        ax.set_xscale("log", base=2)
        ax.set_xticks(concurrency, [str(c) for c in concurrency])
        ax.minorticks_off()
        ax.set_ylim(0, None)
        ax.grid(True, color=GRID, linewidth=0.7)
        if limit is not None and limit <= max(concurrency):
            look = {"color": "#6b675c", "linewidth": 1.4, "linestyle": (0, (4, 2))}
            handles["limit"] = ax.axvline(limit, label=f"{limit_name}: {limit:g} at once", **look)
        if (target := (targets or {}).get(name)) is not None:
            _target(ax, target)
    _legend(figure, list(handles.values()), 4)
    return _measured(figure)
