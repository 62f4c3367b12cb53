"""What moves: sliders and menus above a memory bar that is redrawn at once, as SVG (matplotlib takes 0.2 s a drawing)."""

import html
import textwrap
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from .chapter import attended as is_live
from .report import templates
from .show import CARD, COLORS, INK, _look_of, part_name

# One a colour: patterns that tell the parts apart in grey print
HATCH = ["", "M0 8L8 0", "M4 4h.1", "M0 0L8 8M0 8L8 0", "M0 0L8 8", "M4 0V8M0 4H8", "M4 3a1 1 0 1 0 .1 0", "M0 4H8"]


def memory_svg(
    parts: Sequence[Sequence[Any]], total_gib: float, title: str, *, limit_gib: float | None = None, notes: Sequence[str] = ()
) -> str:  # fmt: skip
    """One card's memory as an SVG of 790 × about 170 px: parts (label, GiB, …), the planning limit, lines of notes below."""
    end = max(total_gib, sum(max(0.0, p[1]) for p in parts)) or 1.0
    drawn, begin = [], 0.0
    for position, (label, gib, *_) in enumerate(parts):
        look, size = _look_of(label, position), max(0.0, gib)
        look = look if look is None else look % len(COLORS)
        drawn.append({"name": part_name(label, gib), "look": look, "begin": begin, "gib": size})
        begin += size
    return templates().get_template("memory.xml").render(
        parts=drawn, scale=766 / end, total=total_gib, limit=limit_gib, title=title, colors=COLORS, hatches=HATCH,
        ink=INK, card=CARD, lines=[line for note in notes for line in textwrap.wrap(note, 112)],
    )  # fmt: skip


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
