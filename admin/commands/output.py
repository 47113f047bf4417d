"""What a verb prints, and how a failure becomes an exit code.

Exit codes: 0 done, 1 refused by the server, 2 wrong call or settings, 3 no server answers or none is named.
Ctrl-C ends with 130.
"""

from __future__ import annotations

import csv
import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import TYPE_CHECKING, NoReturn

import typer

if TYPE_CHECKING:
    from loramux.admin.client import AdminClient, Document

REFUSED, WRONG_CALL, UNREACHABLE = 1, 2, 3


@contextmanager
def connected(as_json: bool) -> Iterator[AdminClient]:
    """A client from the environment; whatever it raises ends the program with a sentence and an exit code."""
    from loramux.admin.client import AdminClient, AdminError, ServerUnreachable
    from loramux.admin.commands.root import chosen_profile

    try:
        with AdminClient.from_environment(chosen_profile.get()) as client:
            yield client
    except AdminError as error:
        fail(error.message, REFUSED, error.envelope() if as_json else None)
    except ServerUnreachable as error:
        fail(str(error), UNREACHABLE, error_document(str(error), "server_unreachable") if as_json else None)


def fail(message: str, exit_code: int, document: Document | None = None) -> NoReturn:
    """Say what went wrong, as JSON on standard output when `document` is given, and exit."""
    if document is not None:
        print_json(document)
    else:
        for line in message.splitlines():
            print(f"loramux: {line}", file=sys.stderr)
    raise typer.Exit(exit_code)


def error_document(message: str, code: str | None, param: str | None = None) -> Document:
    """The envelope of a refusal that was not the server's, with the same fields."""
    return {"error": {"message": message, "code": code, "param": param}}


def print_json(document: object) -> None:
    print(json.dumps(document, indent=2, ensure_ascii=False))


def print_table(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """A table; where no terminal limits the width, no column is shortened."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console()
    if not console.is_terminal:
        console.width = 250
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        table.add_column(column, no_wrap=True)
    for row in rows:
        # A name is a tenant's text: it is shown as it is, never read as markup.
        table.add_row(*(Text("-" if value is None else str(value)) for value in row))
    console.print(table)


def print_csv(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """CSV (RFC 4180) of numbers and of names that are ours; an absent value is an empty cell."""
    writer = csv.writer(sys.stdout)
    writer.writerow(columns)
    writer.writerows(rows)


def shown_time(seconds: int | None) -> str | None:
    """A time of the REST, which counts seconds since 1970, for people."""
    return None if seconds is None else datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M:%SZ")
