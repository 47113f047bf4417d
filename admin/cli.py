"""`loramux`: the command line. Verbs import what they need when they run, so that help appears at once."""

from __future__ import annotations

import typer

from loramux.admin.commands import (
    adapters,
    aliases,
    audit,
    database,
    doctor,
    grants,
    jobs,
    keys,
    prices,
    profiles,
    quotas,
    requests,
    residency,
    root,
    serve,
    tenants,
    usage,
)

app = typer.Typer(
    no_args_is_help=True,
    # A traceback with local variables would show keys.
    pretty_exceptions_enable=False,
    epilog="Verbs of an administrator call the server of --profile, else the one at LORAMUX_ADMIN_URL with "
    "LORAMUX_ADMIN_KEY, else the current profile.",
)
app.callback()(root.root)
app.command("serve")(serve.serve)
app.command("gateway")(serve.gateway)
app.command("demo")(serve.demo)
app.add_typer(database.app, name="db")
app.add_typer(tenants.app, name="tenants")
app.add_typer(keys.app, name="keys")
app.add_typer(adapters.app, name="adapters")
app.add_typer(aliases.app, name="aliases")
app.add_typer(grants.app, name="grants")
app.add_typer(quotas.app, name="quotas")
app.command("usage")(usage.usage)
app.command("costs")(usage.costs)
app.add_typer(prices.app, name="prices")
app.command("audit")(audit.audit)
app.command("residency")(residency.residency)
app.add_typer(requests.app, name="requests")
app.add_typer(jobs.app, name="jobs")
app.add_typer(profiles.app, name="profiles")
app.command("doctor")(doctor.doctor)


def main() -> None:
    app()


if __name__ == "__main__":
    main()
