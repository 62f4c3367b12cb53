"""The figures of a request: when its tokens came, the patches that a picture is cut into, what sampling does to its words."""

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from .show import CARD, COLORS, GRID, INK, _axes, _figure, _fill, _legend, _measured, _patch, _rows, _style

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from .dissection import Dissection
    from .vision import ImageTokens

KINDS = {
    "reasoning": (1, 0.17, "reasoning token"),
    "content": (0, 0.33, "answer token"),
    "tool": (3, 0.25, "tool call"),
}


def one_line(text: str | None, width: int = 400) -> str:
    """A model's words in one line, so that any answer can be shown: line ends as ⏎, ten and more of one sign counted
    (⏎×128, as random weights write), what is beyond `width` as …."""
    line = re.sub(r"(.)\1{9,}", lambda run: f"{run[1]}×{len(run[0])}", (text or "").strip(" ").replace("\n", "⏎"))
    return line if len(line) <= width else line[: width - 1] + "…"


def timeline(dissection: "Dissection | Sequence[Dissection]", names: Sequence[str] | None = None) -> "Figure":
    """One request a row: a bar up to the first token (TTFT: waiting and prefill), then a tick for every chunk of tokens.

    Ticks of reasoning are short, those of the answer long, so that they differ without colour. Time in ms.
    """
    from matplotlib.lines import Line2D

    rows = list(dissection) if isinstance(dissection, Sequence) else [dissection]
    names = list(names or [""] * len(rows))
    title = _title(rows, names)
    figure = _figure(1.7 + 0.75 * len(rows), title)
    ax = _rows(_axes(figure, title, "ms since the call"), names)
    seen, texts, end = set(), [], 1e-3
    for row, d in enumerate(rows):
        first, last = d.ttft, d.e2e
        end = max([end, last or 0.0, *(c.t for c in d.chunks)])
        for kind, (color, half, _) in KINDS.items():
            times = [c.t * 1000 for c in d.chunks if c.kind == kind and c.tokens]
            if times:
                seen.add(kind)
                ax.vlines(
                    times, row - half, row + half, color=COLORS[color], linewidth=max(0.45, min(2.2, 160 / len(times)))
                )
        text = "" if d.complete else "the stream broke off"
        if first is not None and last is not None:
            ax.barh(row, first * 1000, height=0.46, **_fill(7))
            text = f"TTFT {first * 1000:,.0f} ms · {d.completion_tokens} tokens · E2E {last * 1000:,.0f} ms"
        ax.text(0, row - 0.37, text, fontsize=8.8, color=INK, va="bottom")
        texts.append(text)
    ax.set_xlim(0, end * 1000 * 1.02)
    ticks = [
        Line2D([], [], color=COLORS[color], linestyle="", marker="|", markersize=26 * half + 4, markeredgewidth=2.4, label=label)
        for kind, (color, half, label) in KINDS.items()
        if kind in seen
    ]  # fmt: skip
    _legend(figure, [_patch(7, "up to the first token: wait and prefill"), *ticks], 3)
    said = [f"{name or 'request'}: {text}" for name, text in zip(names, texts, strict=False)]
    figure.alt = f"{title}. {'; '.join(said)}"
    return _measured(figure)


def _title(rows: Sequence[Any], names: Sequence[str]) -> str:
    d = rows[0]
    if len(rows) == 2 and d.e2e and rows[1].e2e:
        second = names[1][:1].upper() + names[1][1:] or "The second"
        return f"{second}: {rows[1].e2e / d.e2e:.1f} times the time of {names[0] or 'the first'}"
    if len(rows) > 1:
        return "The same clock for each: wait for the first token, then a tick a chunk"
    return f"The first token took {d.ttft / d.e2e:.0%} of the request" if d.ttft and d.e2e else "No token came"


def patch_grid(image: Any, tokens: "ImageTokens") -> "Figure":
    """The picture as the vision tower cuts it: thin lines between patches, thick ones round the patches of one token."""
    t = tokens
    title = f"{t.resized_w} × {t.resized_h} pixels → {t.grid_w} × {t.grid_h} patches → {t.tokens} tokens"
    height = min(6.2, max(2.4, 5.4 * t.resized_h / t.resized_w + 0.9))
    figure = _figure(height, f"{title}: a picture of {t.width} × {t.height} pixels under the grid of its patches", 6.4)
    ax = _axes(figure, title, "")
    shown = image.convert("RGB").resize((min(t.resized_w, 1600), min(t.resized_h, 1600)))
    ax.imshow(shown, extent=(0, t.resized_w, t.resized_h, 0), interpolation="nearest")
    for step, width, color in ((t.patch, 0.4, "#9a978c"), (t.patch * t.merge, 1.1, INK)):
        if t.resized_w / step <= 160:  # finer the eye cannot follow
            ax.vlines(range(0, t.resized_w + 1, step), 0, t.resized_h, color=color, linewidth=width)
            ax.hlines(range(0, t.resized_h + 1, step), 0, t.resized_w, color=color, linewidth=width)
    ax.set_xlim(0, t.resized_w)
    ax.set_ylim(t.resized_h, 0)
    lines = f"pixels; thin lines: patches of {t.patch} × {t.patch}, dark lines: {t.merge} × {t.merge} patches become one token"
    ax.set_xlabel(lines, color=INK, fontsize=9)
    return figure


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
        ax.tick_params(axis="y", labelsize=8.5)
        ax.grid(True, axis="x", color=GRID, linewidth=0.7)
        possible = sum(p > 0 for p in after)
        said.append(f"{name}: {max(after):.0%} for the likeliest, {possible} of {len(tokens)} possible")
    axes[0].set_yticks(places, [repr(t).replace("$", r"\$") for t in tokens])  # no formula; all panels share its axes
    axes[0].set(xlim=(0, 1), ylim=(len(tokens) - 0.4, -0.6), xticks=(0, 0.5, 1))
    for ax in axes[len(panels) :]:
        ax.set_visible(False)
    dashed = Line2D([], [], color=INK, linewidth=1.1, linestyle=(0, (2, 1.5)), label="without it")
    _legend(figure, [_patch(0, "with the parameter"), dashed], 2)
    figure.alt = f"{title}. " + "; ".join(said)
    return figure
