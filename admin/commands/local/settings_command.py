"""A command whose options are settings."""

from __future__ import annotations

from typing import Any

from typer.core import TyperCommand


class SettingsCommand(TyperCommand):
    """Not every setting has an option. The error for such an option says where to set it instead."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        # Completion parses with `resilient_parsing`, in which nothing may be refused.
        if not ctx.resilient_parsing and (refusal := self._refusal(args)) is not None:
            helps = [word for word in args if word in ctx.help_option_names]
            if not helps:
                ctx.fail(refusal)
            args = helps
        return super().parse_args(ctx, args)

    def _refusal(self, args: list[str]) -> str | None:
        known = {name for option in self.params for name in option.opts}
        for flag in [word.partition("=")[0] for word in args if word.startswith("--")]:
            if flag not in known and _is_setting(name := flag.removeprefix("--").replace("-", "_")):
                return f"No such option: {flag}. Set LORAMUX_{name.upper()}, or {name} in the file of --config."
        return None


def _is_setting(name: str) -> bool:
    from loramux.admin.server.settings import Settings

    return name in Settings.model_fields
