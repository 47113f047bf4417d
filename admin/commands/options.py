"""Options that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]
ConfigFile = Annotated[Path | None, typer.Option("--config", help="TOML file with settings.")]
DataDir = Annotated[Path | None, typer.Option("--data-dir", help="The data directory (default: loramux-data).")]
DatabaseUrl = Annotated[
    str | None, typer.Option("--database-url", help="postgresql://... or sqlite:///FILE (default: in --data-dir).")
]
Tenant = Annotated[str, typer.Option("--tenant", help="A tenant's slug or identifier.")]
AnyTenant = Annotated[str | None, typer.Option("--tenant", help="A tenant's slug or identifier.")]
Model = Annotated[str, typer.Argument(metavar="TENANT/ADAPTER", help="The adapter's full name.")]
VersionedModel = Annotated[str, typer.Argument(metavar="TENANT/ADAPTER@VERSION", help="The version's full name.")]
Alias = Annotated[str, typer.Option("--alias", help="The alias's name.")]
NoWarm = Annotated[
    bool, typer.Option("--no-warm", help="Move the alias without first loading its versions into the engine.")
]


def given_amount(text: str, unit: str, option: str) -> int:
    """Parse the amount that an option gives: money in the currency, bytes with or without a binary unit, or a count.

    Raises BadParameter.
    """
    from loramux.platform.amounts import amount_of

    try:
        return amount_of(text, unit)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint=option) from None
