"""Tables of a chapter: HTML in a notebook, aligned text elsewhere; every cell escaped, numbers with the digits a reader needs."""

import html
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

LOOK = {  # of a cell under its head
    "left": ";max-width:48em;white-space:pre-wrap",
    "right": ";font-variant-numeric:tabular-nums",
}

NUMERAL = re.compile(r"[-–−]?\d[\d,.]*(e[+-]?\d+)? ?[*%]?|[–-]|nan")


class Table:
    """Rows (tuples, named tuples or dicts, or a mapping's names and values) with column names. Everything is escaped."""

    def __init__(self, rows: Sequence[Any] | Mapping, columns: Sequence[str] | None = None, caption: str | None = None):
        rows = list(rows.items() if isinstance(rows, Mapping) else rows)
        first = rows[0] if rows else ()
        if isinstance(first, Mapping):
            columns = columns or list(dict.fromkeys(name for row in rows for name in row))
            rows = [[row.get(name) for name in columns] for row in rows]
        self.rows, self.caption = [list(row) for row in rows], caption
        self.columns = [str(name) for name in columns or getattr(first, "_fields", [""] * len(first))]
        self.sides = ["right" if _numbers(column) else "left" for column in zip(*self.rows, strict=True)]

    def _repr_html_(self) -> str:
        if not self.rows:
            return f"<p><em>{escape(self.caption or 'nothing to show')}</em></p>"
        head = f"<thead>{self._html_row('th', self.columns)}</thead>" if any(self.columns) else ""
        body = "".join(self._html_row("td", map(number, row)) for row in self.rows)
        caption = f'<caption style="text-align:left">{escape(self.caption)}</caption>' if self.caption else ""
        return f"<table>{caption}{head}<tbody>{body}</tbody></table>"

    def _html_row(self, tag: str, texts: Iterable[str]) -> str:
        looks = [f"text-align:{side}" + (LOOK[side] if tag == "td" else "") for side in self.sides]
        cells = [f'<{tag} style="{look}">{escape(text)}</{tag}>' for look, text in zip(looks, texts, strict=True)]
        return f"<tr>{''.join(cells)}</tr>"

    def __repr__(self) -> str:
        if not self.rows:
            return self.caption or "nothing to show"
        grid = [self.columns] if any(self.columns) else []
        grid += [[number(value).replace("\n", " ") for value in row] for row in self.rows]
        marks = [
            ("<>"[side == "right"], max(map(len, texts)))
            for side, texts in zip(self.sides, zip(*grid, strict=True), strict=True)
        ]
        lines = ["  ".join(f"{t:{mark}{width}}" for t, (mark, width) in zip(row, marks, strict=True)) for row in grid]
        return "\n".join(line.rstrip() for line in ([self.caption] if self.caption else []) + lines)


table = Table  # as the chapters call it


def _numbers(values: Sequence[Any]) -> bool:
    """Whether a column is one of numbers: three quarters of what is told are, in figures or as text ("4,096", "22.0 *")."""
    told = [str(v) for v in values if v is not None]
    return bool(told) and 4 * sum(NUMERAL.fullmatch(text) is not None for text in told) >= 3 * len(told)


def number(value: Any) -> str:
    """A cell's text: None is a dash, numbers have as many digits as a reader needs."""
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return "–"
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value)
    if isinstance(value, int):
        return f"{value:,}" if abs(value) >= 10_000 else str(value)
    if abs(value) < 1:
        return f"{value or 0:.3g}"
    return f"{value:,.0f}" if abs(value) >= 10_000 else f"{value:,.2f}"


def escape(text: Any) -> str:
    """Text for HTML in a notebook, where a lone $ would start a formula."""
    return html.escape(str(text)).replace("$", "<span>$</span>")
