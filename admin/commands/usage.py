"""`loramux usage`: what tenants have used."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Any

import typer

from loramux.admin.commands.options import AnyTenant, AsJson
from loramux.admin.commands.output import connected, print_json, print_table, shown_time

DEFAULT_GROUPS = ["tenant", "model"]
AMOUNTS = ("requests", "prompt_tokens", "cached_tokens", "completion_tokens")


class Format(StrEnum):
    """How the report is printed."""

    TABLE = "table"
    JSON = "json"
    CSV = "csv"


class Bucket(StrEnum):
    """The length of one line's time."""

    MINUTE = "1m"
    HOUR = "1h"
    DAY = "1d"


def usage(
    tenant: AnyTenant = None,
    start: Annotated[int | None, typer.Option(help="Seconds since 1970.", show_default=False)] = None,
    end: Annotated[int | None, typer.Option(help="Seconds since 1970, not included.", show_default=False)] = None,
    bucket: Annotated[Bucket | None, typer.Option(help="Split by time.", show_default=False)] = None,
    group_by: Annotated[
        list[str] | None,
        typer.Option(help="tenant, key, adapter, version, model, endpoint or status; may be repeated."),
    ] = None,
    output: Annotated[Format, typer.Option("--format", help="How to print it.")] = Format.TABLE,
    as_json: AsJson = False,
) -> None:
    """Report requests and tokens."""
    chosen = Format.JSON if as_json else output
    params: dict[str, Any] = {
        "tenant": tenant,
        "start": start,
        "end": end,
        "bucket": bucket.value if bucket else None,
        "group_by": ",".join(group_by or DEFAULT_GROUPS),
    }
    with connected(chosen is Format.JSON) as client:
        if chosen is Format.CSV:
            print(client.get_text("usage", **params, format="csv"), end="")
            return
        report = client.get("usage", **params)
    if chosen is Format.JSON:
        print_json(report)
        return
    groups = group_by or DEFAULT_GROUPS
    print_table(
        ("from", *groups, *AMOUNTS),
        [
            (shown_time(bucket["start_time"]), *(result[name] for name in (*groups, *AMOUNTS)))
            for bucket in report["data"]
            for result in bucket["results"]
        ],
    )
