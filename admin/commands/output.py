"""What a verb prints, and how a failure becomes an exit code.

Exit codes: 0 done, 1 refused by the server, 2 wrong call or settings, 3 no server answers or none is named.
Ctrl-C ends with 130.
"""

from __future__ import annotations

import csv
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from operator import itemgetter
from typing import TYPE_CHECKING, Any, NoReturn

import typer

from loramux.admin.exit_codes import REFUSED, UNREACHABLE

if TYPE_CHECKING:
    from loramux.admin.client.client import AdminClient, Document
    from loramux.admin.client.named_adapter import NamedAdapter

Columns = Mapping[str, str | Callable[[dict[str, Any]], object]]
"""The columns of a table: what of an item stands in each, by a field's name or a function."""


@contextmanager
def connected(as_json: bool) -> Iterator[AdminClient]:
    """A client from the environment; whatever it raises ends the program with a sentence and an exit code."""
    from loramux.admin.client.client import AdminClient, AdminError, ServerUnreachable
    from loramux.admin.commands.root import chosen_profile

    try:
        with AdminClient.from_environment(chosen_profile.get()) as client:
            yield client
    except AdminError as error:
        is_limit = error.status == 429 and error.retry_after_s is not None
        again = f": try again in {error.retry_after_s} s" if is_limit else ""
        fail(error.message + again, REFUSED, error.envelope() if as_json else None)
    except ServerUnreachable as error:
        fail(str(error), UNREACHABLE, error_document(str(error), "server_unreachable") if as_json else None)


@contextmanager
def connected_to(
    model: str, as_json: bool, *, needs_version: bool = False
) -> Iterator[tuple[AdminClient, NamedAdapter]]:
    """`connected`, with the adapter or version that `model` names."""
    from loramux.admin.client.named_adapter import find_named

    with connected(as_json) as client:
        yield client, find_named(client, model, needs_version=needs_version)


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


def tell(document: object, sentence: str, as_json: bool) -> None:
    """Say what a verb did: in a sentence, or with the document as JSON."""
    print_json(document) if as_json else print(sentence)


def print_list(document: Document, columns: Columns, as_json: bool) -> None:
    """A list as JSON, or as a table."""
    if as_json:
        print_json(document)
        return
    cells = [itemgetter(of) if isinstance(of, str) else of for of in columns.values()]
    print_table(tuple(columns), [[cell(item) for cell in cells] for item in document["data"]])


def time_in(name: str) -> Callable[[Document], object]:
    """For `print_list`: a field that is a time."""
    return lambda item: shown_time(item[name])


def print_table(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """A table that shortens nothing: where a terminal is too narrow, each row is shown from top to bottom.

    Of two columns, the second goes on in the next line instead.
    """
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console()
    # A name is a tenant's text: it is shown as it is, never read as markup.
    cells = [[Text("-" if value is None else str(value)) for value in row] for row in rows]
    table = Table(box=None, pad_edge=False, header_style="bold")
    for at, column in enumerate(columns):
        table.add_column(column, no_wrap=len(columns) != 2 or at == 0, overflow="fold")
    for row in cells:
        table.add_row(*row)
    width = console.measure(table, options=console.options.update(max_width=100_000)).maximum
    if not console.is_terminal:
        console.width = max(console.width, width)
    if len(columns) == 2 or width <= console.width:
        console.print(table)
        return
    for at, row in enumerate(cells):
        if at > 0:
            console.print()
        one = Table(box=None, pad_edge=False, show_header=False)
        one.add_column(style="bold", no_wrap=True)
        one.add_column(overflow="fold")
        for column, cell in zip(columns, row, strict=True):
            one.add_row(column, cell)
        console.print(one)


def print_csv(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """CSV (RFC 4180) of numbers and of names that are ours; an absent value is an empty cell."""
    writer = csv.writer(sys.stdout)
    writer.writerow(columns)
    writer.writerows(rows)


def shown_time(seconds: int | None) -> str | None:
    """A time of the REST, which counts seconds since 1970, for people."""
    return None if seconds is None else datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M:%SZ")
