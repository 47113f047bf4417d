"""`loramux`: the command line. Commands import their dependencies when they run, so that help appears quickly."""

from __future__ import annotations

import sys
from typing import Any

import typer
from typer.core import TyperGroup

from loramux.admin.commands import root
from loramux.admin.commands.administration import (
    adapters,
    aliases,
    audit,
    bases,
    evals,
    grants,
    jobs,
    keys,
    prices,
    profiles,
    quotas,
    replicas,
    requests,
    residency,
    tenants,
    usage,
    watch,
    webhooks,
)
from loramux.admin.commands.inference import batches, bench, chat
from loramux.admin.commands.local import check, cluster, database, doctor, models, pull, serve
from loramux.admin.commands.local.settings_command import SettingsCommand
from loramux.admin.exit_codes import INTERRUPTED


class Commands(TyperGroup):
    """All commands. A command without its group, such as `push`, is refused with advice to write `adapters push`."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        name = args[0]
        full = [f"'{group} {name}'" for group, verbs in self.commands.items() if name in getattr(verbs, "commands", ())]
        if full and name not in self.commands and not ctx.resilient_parsing:
            ctx.fail(f"No such command {name!r}. Did you mean {', '.join(full)}?")
        return super().resolve_command(ctx, args)


app = typer.Typer(
    cls=Commands,
    no_args_is_help=True,
    # A traceback with local variables would reveal keys.
    pretty_exceptions_enable=False,
    epilog="Administrative commands call the server given by --profile or LORAMUX_PROFILE, or else by "
    "LORAMUX_ADMIN_URL and LORAMUX_ADMIN_KEY, or else by the current profile.",
)
app.callback()(root.root)
HERE, VERBS = "On this machine", "Over the network, with an administrator's key"
CLIENTS = "Over the network, with a tenant's key"

app.command("serve", cls=SettingsCommand, rich_help_panel=HERE)(serve.serve)
app.command("gateway", cls=SettingsCommand, rich_help_panel=HERE)(serve.gateway)
app.command("demo", rich_help_panel=HERE)(serve.demo)
app.command("pull", rich_help_panel=HERE)(pull.pull)
app.add_typer(cluster.app, name="cluster", rich_help_panel=HERE)
app.add_typer(models.app, name="models", rich_help_panel=HERE)
app.add_typer(database.app, name="db", rich_help_panel=HERE)
app.command("run", rich_help_panel=CLIENTS)(batches.run)
app.add_typer(batches.app, name="batches", rich_help_panel=CLIENTS)
app.command("check", rich_help_panel=HERE)(check.check)
app.command("doctor", rich_help_panel=HERE)(doctor.doctor)
app.command("chat", rich_help_panel=CLIENTS)(chat.chat)
app.command("bench", rich_help_panel=CLIENTS)(bench.bench)
app.add_typer(tenants.app, name="tenants", rich_help_panel=VERBS)
app.add_typer(keys.app, name="keys", rich_help_panel=VERBS)
app.add_typer(adapters.app, name="adapters", rich_help_panel=VERBS)
app.add_typer(aliases.app, name="aliases", rich_help_panel=VERBS)
app.command("eval", rich_help_panel=VERBS)(evals.evaluate)
app.add_typer(evals.app, name="evals", rich_help_panel=VERBS)
app.add_typer(grants.app, name="grants", rich_help_panel=VERBS)
app.add_typer(quotas.app, name="quotas", rich_help_panel=VERBS)
app.command("usage", rich_help_panel=VERBS)(usage.usage)
app.command("costs", rich_help_panel=VERBS)(usage.costs)
app.add_typer(prices.app, name="prices", rich_help_panel=VERBS)
app.command("audit", rich_help_panel=VERBS)(audit.audit)
app.command("residency", rich_help_panel=VERBS)(residency.residency)
app.command("replicas", rich_help_panel=VERBS)(replicas.replicas)
app.add_typer(bases.app, name="bases", rich_help_panel=VERBS)
app.add_typer(requests.app, name="requests", rich_help_panel=VERBS)
app.command("watch", rich_help_panel=VERBS)(watch.watch)
app.add_typer(webhooks.app, name="webhooks", rich_help_panel=VERBS)
app.add_typer(jobs.app, name="jobs", rich_help_panel=VERBS)
app.add_typer(profiles.app, name="profiles", rich_help_panel=VERBS)


def main() -> None:
    try:
        app()
    except SystemExit as end:
        if end.code == INTERRUPTED:
            print("\nloramux: interrupted; requests already sent to a server still take effect", file=sys.stderr)
        raise


if __name__ == "__main__":
    main()
