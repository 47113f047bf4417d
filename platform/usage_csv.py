"""Usage as CSV (RFC 4180) that a spreadsheet cannot mistake for formulas."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator, Sequence
from dataclasses import fields

from loramux.platform.usage_report import GROUPS, UsageRow

# A cell that begins with one of these may be run as a formula by Excel or LibreOffice (OWASP, CSV injection).
_FORMULA_STARTS = ("=", "+", "-", "@", "\t", "\r")


def usage_csv(rows: Sequence[UsageRow], group_by: Sequence[str]) -> Iterator[str]:
    """The header, then one line a row; only the groups that were asked for have a column."""
    columns = [field.name for field in fields(UsageRow) if field.name not in GROUPS or field.name in group_by]
    yield _line(columns)
    for row in rows:
        yield _line([_cell(getattr(row, name)) for name in columns])


def _cell(value: str | int | None) -> str:
    if value is None:
        return ""
    if isinstance(value, str) and value.startswith(_FORMULA_STARTS):
        return f"'{value}"
    return str(value)


def _line(cells: Sequence[str]) -> str:
    buffer = io.StringIO()
    csv.writer(buffer).writerow(cells)
    return buffer.getvalue()
