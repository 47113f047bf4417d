"""Formats rows as newline-delimited JSON, or as CSV (RFC 4180) that spreadsheets do not evaluate as formulas."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import msgspec

# Excel and LibreOffice may evaluate a cell that begins with one of these as a formula (OWASP, CSV injection).
_FORMULA_STARTS = ("=", "+", "-", "@", "\t", "\r")


def csv_line(cells: Sequence[str | int | None]) -> str:
    buffer = io.StringIO()
    csv.writer(buffer).writerow([_cell(cell) for cell in cells])
    return buffer.getvalue()


def csv_lines(documents: Iterable[Mapping[str, Any]], columns: Sequence[str]) -> Iterator[str]:
    for document in documents:
        yield csv_line([document[name] for name in columns])


def ndjson_line(document: Mapping[str, Any]) -> str:
    return msgspec.json.encode(document).decode() + "\n"


def _cell(value: str | int | None) -> str:
    if value is None:
        return ""
    if isinstance(value, str) and value.startswith(_FORMULA_STARTS):
        return f"'{value}"
    return str(value)
