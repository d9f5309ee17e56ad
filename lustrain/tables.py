"""Tables of plain text."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from lustrain.problem import plain


def table(heads: Sequence[str], rows: Sequence[Sequence[str]], right: Collection[str] = ()) -> list[str]:
    """Return lines of columns as wide as they need to be; a column of whole numbers, and those named in `right`, end on the
    right."""
    shown = [[plain(cell) for cell in row] for row in rows]
    widths = [max(len(row[at]) for row in [list(heads), *shown]) for at in range(len(heads))]
    figures = [bool(shown) and all(row[at].isdigit() or row[at] == "-" for row in shown) for at in range(len(heads))]
    ends = [head in right or figure for head, figure in zip(heads, figures, strict=True)]
    return ["  ".join(_cells(row, widths, ends)).rstrip() for row in [list(heads), *shown]]


def _cells(row: Sequence[str], widths: Sequence[int], right: Sequence[bool]) -> list[str]:
    return [
        cell.rjust(width) if end else cell.ljust(width) for cell, width, end in zip(row, widths, right, strict=True)
    ]
