"""One figure: what each sampling parameter does to one distribution."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from .show import CARD, COLORS, GRID, INK, _figure, _legend, _patch, _style

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def distributions(
    tokens: Sequence[str], panels: Mapping[str, tuple[Sequence[float], Sequence[float]]], *, title: str
) -> "Figure":
    """Small bar charts of the same tokens, three a row: name -> (probabilities before, after). Before is an outline."""
    from matplotlib.lines import Line2D

    rows, places = -(-len(panels) // 3), range(len(tokens))
    figure = _figure(0.9 + rows * (0.75 + 0.24 * len(tokens)), title)
    figure.suptitle(title, x=0.015, ha="left", fontsize=11.5, fontweight="bold", color=INK)
    axes = list(figure.subplots(rows, 3, squeeze=False, sharex=True, sharey=True).flat)
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
