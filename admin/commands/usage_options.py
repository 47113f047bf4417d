"""What `loramux usage` and `loramux costs` have in common: the question, and a bar for each line."""

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
    """How the report is printed."""

    TABLE = "table"
    JSON = "json"
    CSV = "csv"
    NDJSON = "ndjson"


class Bucket(StrEnum):
    """The length of one line's time."""

    MINUTE = "1m"
    HOUR = "1h"
    DAY = "1d"


Start = Annotated[int | None, typer.Option(help="Seconds since 1970.", show_default=False)]
End = Annotated[int | None, typer.Option(help="Seconds since 1970, not included.", show_default=False)]
Last = Annotated[
    str | None,
    typer.Option(
        help="Instead of --start: 90m, 24h, 7d or 4w until the end or now, from a whole minute or hour on.",
        show_default=False,
    ),
]
BucketOption = Annotated[Bucket | None, typer.Option(help="Split by time.", show_default=False)]
GroupBy = Annotated[
    list[str] | None,
    typer.Option(
        help="tenant, key, adapter, version, model, base, endpoint, end_user or status; repeated or with commas."
    ),
]
Timezone = Annotated[str | None, typer.Option(help="Whose midnights part days, as Europe/Berlin.", show_default=False)]
Top = Annotated[
    int | None,
    typer.Option(help="Only so many lines, those of most tokens, and the sum of all.", min=1, max=1000),
]
Output = Annotated[Format, typer.Option("--format", help="How to print it.")]
AsCsv = Annotated[bool, typer.Option("--csv", help="Print CSV: --format csv.")]
AsNdjson = Annotated[bool, typer.Option("--ndjson", help="Print a JSON object a line: --format ndjson.")]


def chosen_format(output: Format, as_json: bool, as_csv: bool, as_ndjson: bool) -> Format:
    """Raises BadParameter where several are asked for."""
    short = [
        kind
        for kind, is_asked in ((Format.JSON, as_json), (Format.CSV, as_csv), (Format.NDJSON, as_ndjson))
        if is_asked
    ]
    if len(short) > 1:
        raise typer.BadParameter("choose one of --json, --csv and --ndjson")
    return short[0] if short else output


def start_of(start: int | None, end: int | None, last: str | None) -> int | None:
    """Where the range begins, in seconds; raises BadParameter."""
    if last is None:
        return start
    found = _LAST.fullmatch(last)
    if found is None:
        raise typer.BadParameter("--last is a number with m, h, d or w, such as 7d")
    if start is not None:
        raise typer.BadParameter("give --start or --last, not both")
    from_s = max(0, (int(time.time()) if end is None else end) - int(found[1]) * UNITS_S[found[2]])
    # From a whole minute or hour on, as the first line of a report by time should be.
    return from_s - from_s % min(UNITS_S[found[2]], UNITS_S["h"])


def groups_of(group_by: list[str] | None, default: list[str]) -> list[str]:
    return [name for part in (default if group_by is None else group_by) for name in part.split(",") if name]


def bar(amount: int, most: int) -> str:
    """A bar whose full length is the largest amount, in eighths of a character."""
    if most <= 0 or amount <= 0:
        return ""
    eighths = max(1, round(amount / most * BAR_WIDTH * 8))
    return "█" * (eighths // 8) + (_EIGHTHS[eighths % 8] if eighths % 8 else "")
