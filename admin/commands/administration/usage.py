"""`loramux usage` and `loramux costs`: tenants' token usage and its cost."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from loramux.admin.commands.administration.usage_options import (
    AsCsv,
    AsNdjson,
    BucketOption,
    End,
    Format,
    GroupBy,
    Last,
    Output,
    Start,
    Timezone,
    Top,
    bar,
    chosen_format,
    groups_of,
    start_of,
)
from loramux.admin.commands.options import AnyTenant, AsJson
from loramux.admin.commands.output import connected, print_exact, print_json, print_table, shown_time

if TYPE_CHECKING:
    from loramux.admin.client.client import Document

DEFAULT_GROUPS = ["tenant", "model"]


def _verb(path: str, what: str, amounts: Sequence[str], drawn: Sequence[str]) -> Callable[..., None]:
    """Create the command for the report at `path`, with the help text `what`. The table shows the columns `amounts` and
    a bar for the sum of the columns `drawn`.
    """

    def verb(
        tenant: AnyTenant = None,
        start: Start = None,
        end: End = None,
        last: Last = None,
        bucket: BucketOption = None,
        group_by: GroupBy = None,
        timezone: Timezone = None,
        top: Top = None,
        output: Output = Format.TABLE,
        as_json: AsJson = False,
        as_csv: AsCsv = False,
        as_ndjson: AsNdjson = False,
    ) -> None:
        groups = groups_of(group_by, DEFAULT_GROUPS)
        report = _report(
            path,
            chosen_format(output, as_json, as_csv, as_ndjson),
            tenant=tenant,
            start=start_of(start, end, last),
            end=end,
            bucket=bucket and bucket.value,
            group_by=",".join(groups),
            timezone=timezone,
            top=top,
        )
        if report is not None:
            _print_lines(report, groups, amounts, drawn)

    verb.__doc__ = what
    return verb


def _report(path: str, chosen: Format, **params: Any) -> Document | None:
    """Fetch a report. Return it if it will be shown as a table. Otherwise, print it and return None."""
    with connected(chosen is Format.JSON) as client:
        if chosen in (Format.CSV, Format.NDJSON):
            print_exact(client.get_text(path, **params, format=chosen.value))
            return None
        report = client.get(path, **params)
    if chosen is Format.JSON:
        print_json(report)
        return None
    return report


def _print_lines(report: Document, groups: Sequence[str], amounts: Sequence[str], drawn: Sequence[str]) -> None:
    lines = [(part, result) for part in report["data"] for result in part["results"]]
    sizes = [sum(result[name] for name in drawn) for _, result in lines]
    most = max(sizes, default=0)
    rows = [
        (
            shown_time(part["start_time"]),
            *(result.get(f"{name}_name", result[name]) for name in groups),
            *(result[name] for name in amounts),
            bar(size, most),
        )
        for (part, result), size in zip(lines, sizes, strict=True)
    ]
    num_results = report.get("num_results", 0)
    if num_results > len(rows):
        total = (report["total"][name] for name in amounts)
        rows.append((rows[0][0], f"all {num_results}", *("" for _ in groups[1:]), *total, ""))
    print_table(("from", *groups, *amounts, ""), rows)


usage = _verb(
    "usage",
    "Report requests and tokens, with a bar for each line's tokens.",
    ("requests", "prompt_tokens", "cached_tokens", "completion_tokens"),
    ("prompt_tokens", "completion_tokens"),
)
costs = _verb(
    "costs",
    "Report the cost of requests, with a bar for each line.",
    ("requests", "amount", "currency"),
    ("amount_nanos",),
)
