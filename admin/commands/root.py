"""Options given before the command: `--profile` and `--version`."""

from __future__ import annotations

from contextvars import ContextVar
from typing import Annotated

import typer

chosen_profile: ContextVar[str | None] = ContextVar("chosen_profile", default=None)
"""The profile given on the command line. If None, the environment or the current profile selects the server."""


def _print_version(is_asked: bool) -> None:
    if is_asked:
        from importlib.metadata import version

        print(f"loramux {version('loramux')}")  # noqa: T201
        raise typer.Exit


def _known_profiles(incomplete: str) -> list[str]:
    from loramux.admin.client.profiles import ProfileError, ProfileFile

    try:
        return [name for name in ProfileFile.of_user().read().profiles if name.startswith(incomplete)]
    except ProfileError:
        return []


def root(
    profile: Annotated[
        str | None,
        typer.Option(
            help="Profile of the server to call; see 'loramux profiles list' (or LORAMUX_PROFILE).",
            autocompletion=_known_profiles,
        ),
    ] = None,
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Multi-tenant LoRA serving: one resident base model, many adapters and exact quotas."""
    chosen_profile.set(profile)
