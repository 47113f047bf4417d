"""`loramux check`: tell whether a base model or an adapter would be served."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import redirect_stdout
from typing import TYPE_CHECKING, Annotated, Any

import typer

from loramux.admin.commands.options import AsJson, DataDir
from loramux.admin.commands.output import error_document, fail, print_json, print_table, print_text, print_warnings
from loramux.admin.exit_codes import REFUSED

if TYPE_CHECKING:
    from loramux.admin.check.verdict import CheckVerdict

ADAPTER_FILE = "adapter_config.json"


def check(
    source: Annotated[
        str,
        typer.Argument(
            metavar="DIRECTORY|FILE.gguf|URL",
            help="A base model's or an adapter's directory, a GGUF file, or the URL of a pulled base.",
        ),
    ],
    model: Annotated[
        str | None,
        typer.Option(
            help="For an adapter, the base model: a directory, GGUF file or pulled URL; its weights are not needed."
        ),
    ] = None,
    dtype: Annotated[str, typer.Option(help="auto, float32 or bfloat16, as for 'loramux serve'.")] = "auto",
    data_dir: DataDir = None,
    as_json: AsJson = False,
) -> None:
    """Check without a server whether a base model or an adapter would be served. If not, show why and exit with 1.

    Only the headers of a base's weights are read. An adapter is validated as an upload would be, with the same limits
    and in the same sandbox. The memory of this machine and a server's settings are not checked.
    """
    from loramux.adapter_store.errors import ValidationFailed
    from loramux.admin.check.adapter_check import check_directory, check_gguf
    from loramux.admin.check.base_check import check_base
    from loramux.admin.commands.local.model_argument import existing_path
    from loramux.platform.errors import Unavailable

    if dtype not in ("auto", "float32", "bfloat16"):
        raise typer.BadParameter("use auto, float32 or bfloat16", param_hint="--dtype")
    path = existing_path(source, data_dir, as_json, "DIRECTORY")
    base = None if model is None else existing_path(model, data_dir, as_json, "--model")
    is_file = not path.is_dir()
    if base is None and (path / ADAPTER_FILE).exists():
        raise typer.BadParameter("an adapter is checked against its base: --model DIRECTORY", param_hint="--model")
    try:
        # Keep log lines, such as warnings about a missing sandbox, out of the report.
        with redirect_stdout(sys.stderr):
            if base is None:
                verdict = check_base(path, dtype)
            else:
                verdict = (check_gguf if is_file else check_directory)(path, base, dtype)
    except (ValidationFailed, Unavailable) as error:
        fail(str(error), REFUSED, error_document(str(error), "check_failed") if as_json else None)
    print_json(verdict.document()) if as_json else _show(verdict)
    if not verdict.is_served:
        raise typer.Exit(REFUSED)


def _show(verdict: CheckVerdict) -> None:
    rows = list(_rows(verdict.facts))
    if rows:
        print_table(("fact", "value"), rows)
    print_warnings([warning.document() for warning in verdict.warnings], sys.stdout)
    for problem in verdict.problems:
        where = "" if problem.param is None else f" [{problem.param}]"
        print_text(f"problem: {problem.message} ({problem.code}){where}")
    print_text(f"{verdict.path} {'would be served' if verdict.is_served else 'would not be served'}")


def _rows(facts: Mapping[str, Any]) -> Iterator[tuple[str, object]]:
    for name, value in facts.items():
        if name == "modules":
            for kind, found in value.items():
                yield kind, f"{len(found['ranks'])} of rank {_span(found['ranks'])}, effect {found['largest_effect']}"
        elif isinstance(value, dict):
            yield from ((f"{name} {key}", _shown(inner)) for key, inner in value.items())
        else:
            yield name, _shown(value)


def _shown(value: Any) -> object:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, dict):
        return ", ".join(f"{name} = {inner}" for name, inner in value.items())
    return ", ".join(map(str, value)) if isinstance(value, list) else value


def _span(ranks: list[int]) -> str:
    return str(ranks[0]) if min(ranks) == max(ranks) else f"{min(ranks)} to {max(ranks)}"
