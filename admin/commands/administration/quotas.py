"""`loramux quotas`: limits for tenants, keys and adapters, their usage, and checks of hypothetical requests."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated

import typer

from loramux.admin.commands.administration.quota_plot import print_plot
from loramux.admin.commands.options import AnyTenant, AsJson, given_amount
from loramux.admin.commands.output import (
    Columns,
    connected,
    print_csv,
    print_json,
    print_list,
    print_table,
    print_text,
    tell,
    time_in,
)

if TYPE_CHECKING:
    from loramux.admin.client.client import Document

app = typer.Typer(no_args_is_help=True, help="Set, list, plot and test quotas.")

METRICS = (
    "requests_per_minute, tokens_per_minute, cold_loads_per_minute, concurrent_requests, tokens_per_day, "
    "batch_tokens_per_day, tokens_per_month, cost_per_day, cost_per_month, adapters, adapter_bytes or stored_bytes."
)
LIMIT = "The limit: money in the currency of the prices, such as 2.50; bytes as a number or a size such as 5GiB."
LISTED = (
    "id",
    "scope",
    "subject_id",
    "subject",
    "tenant_id",
    "tenant",
    "metric",
    "unit",
    "mode",
    "limit",
    "burst",
    "updated_at",
)
SHOWN = (
    "metric",
    "unit",
    "scope",
    "mode",
    "limit",
    "used",
    "reserved",
    "remaining",
    "num_exceeded",
    "is_inherited",
    "window_start",
    "window_end",
    "reset_at",
    "id",
)
AMOUNTS = ("limit", "remaining", "cost", "burst", "used", "reserved")
"""Columns in the metric's unit."""

Key = Annotated[str | None, typer.Option(help="A key's identifier, key_...")]
Adapter = Annotated[str | None, typer.Option(help="An adapter's identifier or, with --tenant, its name.")]
AsCsv = Annotated[bool, typer.Option("--csv", help="Print CSV instead of a table.")]


class Mode(StrEnum):
    """What happens to a request that exceeds its quota."""

    HARD = "hard"
    SOFT = "soft"
    SHADOW = "shadow"


@app.command("set")
def set_quota(
    metric: Annotated[str, typer.Option(help=METRICS)],
    limit: Annotated[str, typer.Option(help=LIMIT)],
    tenant: AnyTenant = None,
    key: Key = None,
    adapter: Adapter = None,
    platform: Annotated[bool, typer.Option("--platform", help="Apply to every tenant without its own limit.")] = False,
    burst: Annotated[int | None, typer.Option(help="Largest burst of a rate limit (default: the limit).")] = None,
    mode: Annotated[
        Mode | None,
        typer.Option(help="hard refuses, soft admits and reports, shadow only counts (default: hard, or unchanged)."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Set or change one limit, effective from the next request."""
    if not platform:
        _check_subject(tenant, key, adapter, "--tenant, --key, --adapter or --platform")
    body = {
        "scope": "platform" if platform else None,
        "tenant": tenant,
        "key": key,
        "adapter": adapter,
        "metric": metric,
        "limit": given_amount(limit, _unit(metric), "--limit"),
        "burst": burst,
        "mode": None if mode is None else mode.value,
    }
    with connected(as_json) as client:
        quota = client.post("quotas", {name: value for name, value in body.items() if value is not None})
    burst_shown = f" (burst {_shown(quota, 'burst')})" if quota["burst"] != quota["limit"] else ""
    whom = "every tenant" if platform else key or adapter or tenant
    told = f"{whom}: {quota['metric']} is limited to {_shown(quota, 'limit')}{burst_shown}, {quota['mode']}"
    tell(quota, told, as_json)


@app.command("list")
def list_quotas(tenant: AnyTenant = None, as_csv: AsCsv = False, as_json: AsJson = False) -> None:
    """List the limits."""
    with connected(as_json) as client:
        quotas = client.whole_list("quotas", tenant=tenant)
    if as_csv and not as_json:
        print_csv(LISTED, [_csv_row(quota, LISTED) for quota in quotas["data"]])
        return
    columns: Columns = {
        "scope": "scope",
        "of": "subject",
        "metric": "metric",
        "mode": "mode",
        "limit": lambda quota: _shown(quota, "limit"),
        "burst": lambda quota: _shown(quota, "burst"),
        "id": "id",
        "changed": time_in("updated_at"),
    }
    print_list(quotas, columns, as_json)


@app.command()
def delete(
    quota_id: Annotated[str, typer.Argument(help="The limit's identifier, qta_...")], as_json: AsJson = False
) -> None:
    """Delete a limit."""
    with connected(as_json) as client:
        quota = client.delete(client.path("quotas", quota_id))
    tell(quota, f"deleted quota {quota['id']}", as_json)


@app.command()
def effective(
    tenant: AnyTenant = None, key: Key = None, adapter: Adapter = None, as_csv: AsCsv = False, as_json: AsJson = False
) -> None:
    """Plot the limits on the requests of a tenant, a key or an adapter, and how much of each limit is used."""
    _check_subject(tenant, key, adapter)
    with connected(as_json) as client:
        found = client.get("quotas/effective", tenant=tenant, key=key, adapter=adapter)
    if as_json:
        print_json(found)
    elif as_csv:
        print_csv(SHOWN, [_csv_row(limit, SHOWN) for limit in found["data"]])
    elif not found["data"]:
        print_text("no limits apply")
    else:
        print_plot(found["data"])


@app.command()
def check(
    prompt_tokens: Annotated[int, typer.Option(help="Number of tokens in the prompt.")],
    max_tokens: Annotated[int, typer.Option(help="Maximum number of tokens per answer.")],
    n: Annotated[int, typer.Option(help="Number of answers.")] = 1,
    tenant: AnyTenant = None,
    key: Key = None,
    adapter: Adapter = None,
    is_batch: Annotated[bool, typer.Option("--batch", help="The request belongs to a batch.")] = False,
    metric: Annotated[
        str | None, typer.Option(help="Also test a hypothetical limit on this metric, for --key or --tenant.")
    ] = None,
    limit: Annotated[str | None, typer.Option(help="Value of the limit on --metric, as for 'quotas set'.")] = None,
    as_json: AsJson = False,
) -> None:
    """Show whether each limit would admit a request, without using any quota.

    Exit with 1 if the request would be refused.
    """
    if (metric is None) != (limit is None):
        raise typer.BadParameter("--metric and --limit must be given together")
    _check_subject(tenant, key, adapter)
    whom = {"tenant": tenant, "key": key, "adapter": adapter}
    body: dict[str, object] = {name: value for name, value in whom.items() if value is not None}
    body.update(prompt_tokens=prompt_tokens, max_tokens=max_tokens, n=n, is_batch=is_batch)
    if metric is not None and limit is not None:
        # With both, --tenant names the caller, and the hypothetical limit is the key's.
        subject = {"key": key} if key is not None else {"tenant": tenant}
        body["quota"] = {**subject, "metric": metric, "limit": given_amount(limit, _unit(metric), "--limit")}
    with connected(as_json) as client:
        answer = client.post("quotas/check", body)
    if as_json:
        print_json(answer)
    else:
        print_table(
            ("metric", "of", "mode", "limit", "remaining", "cost", "admits"),
            [
                (
                    v["metric"],
                    v["scope"],
                    v["mode"],
                    *(_shown(v, name) for name in ("limit", "remaining", "cost")),
                    _admits(v),
                )
                for v in answer["verdicts"]
            ],
        )
        error = answer["error"]
        print_text(
            "the request would be admitted"
            if error is None
            else f"{answer['status']} {error['code']}: {error['message']}"
        )
    if not answer["is_admitted"]:
        raise typer.Exit(1)


def _check_subject(
    tenant: str | None, key: str | None, adapter: str | None, options: str = "--tenant, --key or --adapter"
) -> None:
    if tenant is None and key is None and adapter is None:
        raise typer.BadParameter(f"specify whose requests the limits apply to: {options}")


def _admits(verdict: dict[str, object]) -> str:
    if verdict["admits"]:
        return "yes"
    if verdict["is_too_large"]:
        return "never"
    return f"in {verdict['wait_s']:.0f} s" if verdict["mode"] == "hard" else "reported only"


def _unit(metric: str) -> str:
    """Return a metric's unit. The server refuses an unknown metric, and names the known ones."""
    from loramux.platform.quotas.metrics import METRICS

    return METRICS[metric].unit if metric in METRICS else metric


def _shown(document: Document, name: str) -> str:
    from loramux.platform.amounts import amount_text

    return amount_text(document[name], document["unit"])


def _csv_row(document: Document, names: Sequence[str]) -> list[object]:
    """Return a row of CSV. Money is in the currency, as in every other output of the command except JSON."""
    from loramux.platform.amounts import NANOS_UNIT, decimal

    if document["unit"] != NANOS_UNIT:
        return [document[name] for name in names]
    shown = {**document, "unit": "currency"}
    shown.update({name: decimal(document[name]) for name in AMOUNTS if name in document})
    return [shown[name] for name in names]
