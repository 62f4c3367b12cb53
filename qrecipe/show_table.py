"""Tables of a chapter: HTML in a notebook, aligned text elsewhere; every cell escaped, numbers with the digits a reader needs."""

import html
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, is_dataclass
from typing import Any


class Table:
    """Rows with column names; HTML in a notebook, aligned text elsewhere. Everything is escaped."""

    def __init__(self, rows: Sequence[Any] | Mapping, columns: Sequence[str] | None = None, caption: str | None = None):
        self.rows, self.columns = _cells(rows, columns)
        self.caption = caption

    def __len__(self) -> int:
        return len(self.rows)

    def _repr_html_(self) -> str:
        if not self.rows:
            return f"<p><em>{_escape(self.caption or 'nothing to show')}</em></p>"
        head = "".join(f'<th style="text-align:{self._side(i)}">{_escape(c)}</th>' for i, c in enumerate(self.columns))
        body = "".join(
            "<tr>"
            + "".join(f'<td style="{self._look(i)}">{_escape(number(v))}</td>' for i, v in enumerate(row))
            + "</tr>"
            for row in self.rows
        )
        head = f"<thead><tr>{head}</tr></thead>" if any(self.columns) else ""
        caption = f'<caption style="text-align:left">{_escape(self.caption)}</caption>' if self.caption else ""
        return f"<table>{caption}{head}<tbody>{body}</tbody></table>"

    def _side(self, column: int) -> str:
        values = [r[column] for r in self.rows if r[column] is not None]
        return (
            "right"
            if values and all(isinstance(v, int | float) and not isinstance(v, bool) for v in values)
            else "left"
        )

    def _look(self, column: int) -> str:
        side = self._side(column)
        extra = "font-variant-numeric:tabular-nums" if side == "right" else "max-width:48em;white-space:pre-wrap"
        return f"text-align:{side};{extra}"

    def __repr__(self) -> str:
        if not self.rows:
            return self.caption or "nothing to show"
        text = [[number(v).replace("\n", " ") for v in row] for row in self.rows]
        grid = [list(self.columns), *text] if any(self.columns) else text
        widths = [max(len(row[i]) for row in grid) for i in range(len(self.columns))]
        sides = [self._side(i) for i in range(len(self.columns))]
        lines = [
            "  ".join(
                c.rjust(w) if s == "right" else c.ljust(w) for c, w, s in zip(row, widths, sides, strict=True)
            ).rstrip()
            for row in grid
        ]
        return "\n".join([self.caption, *lines] if self.caption else lines)


def table(rows: Sequence[Any] | Mapping, columns: Sequence[str] | None = None, caption: str | None = None) -> Table:
    """A table of rows (tuples, named tuples, dicts or dataclasses), or of a mapping's names and values."""
    return Table(rows, columns, caption)


def _cells(rows: Any, columns: Sequence[str] | None) -> tuple[list[list[Any]], list[str]]:
    rows = list(rows.items()) if isinstance(rows, Mapping) else list(rows)
    first = rows[0] if rows else ()
    if is_dataclass(first):
        rows = [asdict(r) for r in rows]
        first = rows[0]
    if isinstance(first, Mapping):
        names = list(columns or dict.fromkeys(k for r in rows for k in r))
        cells = [[r.get(c) for c in names] for r in rows]
    else:
        names = list(columns or getattr(first, "_fields", [""] * len(first)))
        cells = [list(r) for r in rows]
    width = max([len(names), *map(len, cells)])
    return [c + [None] * (width - len(c)) for c in cells], [str(n) for n in names] + [""] * (width - len(names))


def number(value: Any) -> str:
    """A cell's text: None is a dash, numbers have as many digits as a reader needs."""
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return "–"
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value)
    if isinstance(value, int):
        return f"{value:,}" if abs(value) >= 10_000 else str(value)
    if value == 0 or math.isinf(value):
        return "0" if value == 0 else str(value)
    return f"{value:,.2f}" if abs(value) >= 1 else f"{value:.3g}"


def _escape(text: Any) -> str:
    return html.escape(str(text)).replace("$", "<span>$</span>")  # a lone $ would start a formula
