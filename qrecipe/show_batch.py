"""Two figures: what sampling parameters do to one distribution, and a sweep over concurrency with its predicted limit."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from .show import CARD, COLORS, DASHES, GRID, INK, MARKERS, _figure, _legend, _patch

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def distributions(tokens: Sequence[str], panels: Mapping[str, tuple[Sequence[float], Sequence[float]]], *, title: str) -> "Figure":
    """Small bar charts of the same tokens, three a row: name -> (probabilities before, after). Before is an outline."""
    from matplotlib.lines import Line2D

    rows = -(-len(panels) // 3)
    figure = _figure(0.9 + rows * (0.75 + 0.24 * len(tokens)), title)
    figure.suptitle(title, x=0.015, ha="left", fontsize=11.5, fontweight="bold", color=INK)
    grid = figure.subplots(rows, 3, sharex=True, sharey=True, squeeze=False).flat
    said = []
    for ax, (name, (before, after)) in zip(grid, panels.items(), strict=False):
        places = range(len(tokens))
        ax.barh(places, after, height=0.72, facecolor=COLORS[0], edgecolor=CARD)
        ax.barh(places, before, height=0.72, facecolor="none", edgecolor=INK, linewidth=1.1, linestyle=(0, (2, 1.5)))
        ax.set_title(name, loc="left", fontsize=9.5, color=INK)
        said.append(f"{name}: {max(after):.0%} for the likeliest, {sum(p > 0 for p in after)} of {len(tokens)} possible")
    for i, ax in enumerate(figure.axes):
        ax.set_visible(i < len(panels))
        ax.set_facecolor(CARD)
        ax.set_xlim(0, 1)
        ax.set_yticks(range(len(tokens)), [repr(t) for t in tokens])
        ax.set_ylim(len(tokens) - 0.4, -0.6)
        ax.grid(True, axis="x", color=GRID, linewidth=0.7)
        ax.set_axisbelow(True)
        ax.tick_params(colors=INK, labelsize=8.5)
        for side, spine in ax.spines.items():
            spine.set_visible(side in ("bottom", "left"))
            spine.set_color(INK)
        if i >= len(panels) - 3:
            ax.set_xlabel("probability", color=INK, fontsize=9)
    dashed = Line2D([], [], color=INK, linewidth=1.1, linestyle=(0, (2, 1.5)), label="without it")
    _legend(figure, [_patch(0, "with the parameter"), dashed], 2)
    figure.alt = f"{title}. " + "; ".join(said)
    return figure


def sweep(
    concurrency: Sequence[int], panels: Mapping[str, Mapping[str, Sequence[float | None]]], *, title: str, limit: float | None = None,
    limit_name: str = "predicted limit", targets: Mapping[str, float] | None = None,
) -> "Figure":  # fmt: skip
    """Panels side by side over concurrency: the panel's name (its y axis) -> line -> values. `limit` is a concurrency,
    drawn upright in each; `targets` maps a panel's name to a value drawn across it."""
    import math

    figure = _figure(3.9, f"{title}: {', '.join(panels)} over concurrency {list(concurrency)}", 3.6 * len(panels))
    figure.suptitle(title, x=0.015, ha="left", fontsize=11.5, fontweight="bold", color=INK)
    axes = figure.subplots(1, len(panels), squeeze=False)[0]
    handles: dict = {}
    inside = limit is not None and limit <= max(concurrency)
    for ax, (name, lines) in zip(axes, panels.items(), strict=True):
        for i, (label, values) in enumerate(lines.items()):
            i += len([k for k in handles if k not in lines])
            clean = [math.nan if v is None else float(v) for v in values]
            (line,) = ax.plot(
                concurrency, clean, color=COLORS[i % 8], linestyle=DASHES[i % 4], marker=MARKERS[i % 6], markersize=5, linewidth=2, label=label
            )  # fmt: skip
            handles.setdefault(label, line)
        ax.set_facecolor(CARD)
        ax.set_xscale("log", base=2)
        ax.set_xticks(concurrency, [str(c) for c in concurrency])
        ax.minorticks_off()
        ax.set_ylim(0, None)
        ax.grid(True, color=GRID, linewidth=0.7)
        ax.tick_params(colors=INK, labelsize=9)
        ax.set_xlabel("requests at once (concurrency)", color=INK, fontsize=9.5)
        ax.set_ylabel(name, color=INK, fontsize=9.5)
        for side, spine in ax.spines.items():
            spine.set_visible(side in ("bottom", "left"))
            spine.set_color(INK)
        if inside:
            handles["limit"] = ax.axvline(limit, color="#6b675c", linewidth=1.4, linestyle=(0, (4, 2)), label=f"{limit_name}: {limit:g} at once")
        if targets and name in targets:
            ax.axhline(targets[name], color=COLORS[5], linewidth=1.2, linestyle=":")
            ax.annotate("target", (1, targets[name]), xycoords=("axes fraction", "data"), xytext=(-4, 3), textcoords="offset points", ha="right", fontsize=8.5, color=INK)
    _legend(figure, list(handles.values()), 4)
    return figure
