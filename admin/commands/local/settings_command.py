"""A command whose options are settings."""

from __future__ import annotations

from typing import Any

from typer.core import TyperCommand


class SettingsCommand(TyperCommand):
    """Not every setting has an option. The error for such an option says where to set it instead."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        known = {name for option in self.params for name in option.opts}
        for flag in [word.partition("=")[0] for word in args if word.startswith("--")]:
            if flag not in known and _is_setting(name := flag.removeprefix("--").replace("-", "_")):
                ctx.fail(f"No such option: {flag}. Set LORAMUX_{name.upper()}, or {name} in the file of --config.")
        return super().parse_args(ctx, args)


def _is_setting(name: str) -> bool:
    from loramux.admin.server.settings import Settings

    return name in Settings.model_fields
