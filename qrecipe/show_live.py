"""What moves: sliders and menus above a memory bar that is redrawn at once, as SVG (matplotlib takes 0.2 s a drawing)."""

import html
import textwrap
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from .chapter import attended as is_live
from .show import CARD, COLORS, INK, _look_of, part_name

# One a colour: patterns that tell the parts apart in grey print
HATCH = ["", "M0 8L8 0", "M4 4h.1", "M0 0L8 8M0 8L8 0", "M0 0L8 8", "M4 0V8M0 4H8", "M4 3a1 1 0 1 0 .1 0", "M0 4H8"]


def memory_svg(
    parts: Sequence[Sequence[Any]], total_gib: float, title: str, *, limit_gib: float | None = None, notes: Sequence[str] = ()
) -> str:  # fmt: skip
    """One card's memory as an SVG of 790 × about 170 px: parts (label, GiB, …), the planning limit, lines of notes below."""
    width, left, bar, y = 790, 12, 766, 52
    end = max(total_gib, sum(max(0.0, p[1]) for p in parts)) or 1.0
    scale, x = bar / end, float(left)
    shapes, legend = [], []
    for position, (label, gib, *_) in enumerate(parts):
        look = _look_of(label, position)
        fill, hatch = ("#ffffff", "") if look is None else (COLORS[look % 8], HATCH[look % 8] and f"url(#h{look % 8})")
        size, key = max(0.0, gib) * scale, (left + position % 3 * 250, 132 + position // 3 * 22)
        shapes.append(_box(x, y, size, 46, fill, hatch))
        legend.append(_box(*key, 28, 14, fill, hatch))
        legend.append(_text(key[0] + 36, key[1] + 12, part_name(label, gib)))
        x += size
    if limit_gib:
        at = left + limit_gib * scale
        shapes.append(f'<path d="M{at:.1f} 40V106" stroke="{INK}" stroke-width="1.4" stroke-dasharray="5 3"/>')
        shapes.append(_text(at - 4, 46, f"utilization {limit_gib / total_gib:.2f}", "end"))
    shapes.append(f'<path d="M{left + total_gib * scale:.1f} 40V106" stroke="{INK}" stroke-width="2"/>')
    shapes.append(_text(left + total_gib * scale, 120, f"{total_gib:.2f} GiB", "end"))
    top = 152 + (len(parts) + 2) // 3 * 22
    lines = [line for note in notes for line in textwrap.wrap(note, 112)]
    below = [_text(left, top + i * 20, line) for i, line in enumerate(lines)]
    height = top - 6 + len(lines) * 20
    shape = f'width="8" height="8" patternUnits="userSpaceOnUse"><path stroke="{CARD}" stroke-width="1.6" stroke-linecap="round" fill="none"'
    hatches = "".join(f'<pattern id="h{i}" {shape} d="{d}"/></pattern>' for i, d in enumerate(HATCH) if d)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" role="img" aria-label="{html.escape(title, quote=True)}" '
        f'style="background:{CARD};max-width:100%"><defs>{hatches}</defs>'
        f'<text x="{left}" y="24" font-size="15" font-weight="bold" fill="{INK}" font-family="sans-serif">{html.escape(title)}</text>'
        f"{''.join(shapes)}{''.join(legend)}{''.join(below)}</svg>"
    )


def _box(x: float, y: float, width: float, height: float, fill: str, hatch: str) -> str:
    box = f'<rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="{height}" fill='
    return f'{box}"{fill}" stroke="#8a877c" stroke-width=".6"/>' + (f'{box}"{hatch}"/>' if hatch else "")


def _text(x: float, y: float, text: str, anchor: str = "start") -> str:
    look = f'font-size="13" text-anchor="{anchor}" fill="{INK}" font-family="sans-serif"'
    return f'<text x="{x:.1f}" y="{y}" {look}>{html.escape(text)}</text>'


def dashboard(draw: Callable[..., str], controls: Mapping[str, Sequence[Any]], **start: Any) -> Any:
    """Menus and sliders over `draw(**values) -> HTML`, redrawn on every change; `controls` maps a name to its choices.

    `start` holds the first values. Where there is no live front end the drawing alone is returned.
    """
    values = {name: start.get(name, choices[0]) for name, choices in controls.items()}
    if not is_live():
        return Drawing(_try(draw, values))
    import ipywidgets as widgets

    picture = widgets.HTML(_try(draw, values))

    boxes = {}
    for name, choices in controls.items():
        numbers = all(isinstance(c, int | float) for c in choices)
        boxes[name] = (widgets.SelectionSlider if numbers else widgets.Dropdown)(
            options=list(choices), value=values[name] if values[name] in choices else choices[0], description=name,
            style={"description_width": "9em"}, layout={"width": "34em"},
        )  # fmt: skip

    def redraw(_: Any) -> None:
        picture.value = _try(draw, {name: box.value for name, box in boxes.items()})

    for box in boxes.values():
        box.observe(redraw, names="value")
    return widgets.VBox([*boxes.values(), picture])


def _try(draw: Callable[..., str], values: Mapping[str, Any]) -> str:
    from .errors import RecipeError

    try:
        return draw(**values)
    except RecipeError as problem:
        return f"<p>{html.escape(str(problem))}</p>"


class Drawing:
    """A drawing of its own in an executed notebook."""

    def __init__(self, page: str) -> None:
        self.page = page

    def _repr_html_(self) -> str:
        return self.page

    def __repr__(self) -> str:
        return "a drawing for a notebook"
