"""Options shared by `loramux usage` and `loramux costs`, and the bars in their tables."""

from __future__ import annotations

import re
import time
from enum import StrEnum
from typing import Annotated

import typer

UNITS_S = {"m": 60, "h": 3600, "d": 86_400, "w": 7 * 86_400}
_LAST = re.compile(r"([1-9][0-9]{0,5})([mhdw])")
BAR_WIDTH = 20
_EIGHTHS = " ▏▎▍▌▋▊▉█"


class Format(StrEnum):
    """Output format of the report."""

    TABLE = "table"
    JSON = "json"
    CSV = "csv"
    NDJSON = "ndjson"


class Bucket(StrEnum):
    """The time span that one line covers."""

    MINUTE = "1m"
    HOUR = "1h"
    DAY = "1d"


Start = Annotated[int | None, typer.Option(help="Unix time in seconds (default: 30 days before the end).")]
End = Annotated[int | None, typer.Option(help="Unix time in seconds, exclusive (default: now).")]
Last = Annotated[
    str | None,
    typer.Option(
        help="Instead of --start: a time span before --end or now, such as 90m, 24h, 7d or 4w; its start is rounded "
        "down to a full minute or hour."
    ),
]
BucketOption = Annotated[Bucket | None, typer.Option(help="Split the report by time.")]
GroupBy = Annotated[
    list[str] | None,
    typer.Option(
        help="tenant, key, adapter, version, model, base, endpoint, end_user, status or service_tier; repeatable or "
        "comma-separated."
    ),
]
Timezone = Annotated[str | None, typer.Option(help="Time zone that defines days, such as Europe/Berlin.")]
Top = Annotated[
    int | None,
    typer.Option(help="Show only the lines with the most tokens, and the total of all lines.", min=1, max=1000),
]
Output = Annotated[Format, typer.Option("--format", help="Output format.")]
AsCsv = Annotated[bool, typer.Option("--csv", help="Print CSV; short for --format csv.")]
AsNdjson = Annotated[bool, typer.Option("--ndjson", help="Print one JSON object per line; short for --format ndjson.")]


def chosen_format(output: Format, as_json: bool, as_csv: bool, as_ndjson: bool) -> Format:
    """Return the output format. Raises BadParameter if several are given."""
    short = [
        kind
        for kind, is_asked in ((Format.JSON, as_json), (Format.CSV, as_csv), (Format.NDJSON, as_ndjson))
        if is_asked
    ]
    if len(short) > 1:
        raise typer.BadParameter("choose one of --json, --csv or --ndjson")
    return short[0] if short else output


def start_of(start: int | None, end: int | None, last: str | None) -> int | None:
    """Return the start of the time range as a Unix time in seconds. Raises BadParameter."""
    if last is None:
        return start
    found = _LAST.fullmatch(last)
    if found is None:
        raise typer.BadParameter("--last must be a number followed by m, h, d or w, such as 7d")
    if start is not None:
        raise typer.BadParameter("specify --start or --last, not both")
    from_s = max(0, (int(time.time()) if end is None else end) - int(found[1]) * UNITS_S[found[2]])
    # Round down to a full minute or hour, so that the first minute or hour of a time series is complete.
    return from_s - from_s % min(UNITS_S[found[2]], UNITS_S["h"])


def groups_of(group_by: list[str] | None, default: list[str]) -> list[str]:
    return [name for part in (default if group_by is None else group_by) for name in part.split(",") if name]


def bar(amount: int, most: int) -> str:
    if most <= 0 or amount <= 0:
        return ""
    eighths = max(1, round(amount / most * BAR_WIDTH * 8))
    return "█" * (eighths // 8) + (_EIGHTHS[eighths % 8] if eighths % 8 else "")
