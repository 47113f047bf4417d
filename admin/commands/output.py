"""Command output and exit codes.

Commands print only with these functions. Tenants, files and servers choose much of the text, which must not control the
terminal.

Exit codes: 0 success, 1 refused, 2 wrong usage or settings, 3 no server is configured or reachable, 130 interrupted
with Ctrl-C.
"""

from __future__ import annotations

import csv
import io
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from operator import itemgetter
from typing import TYPE_CHECKING, Any, NoReturn, TextIO

import typer

from loramux.admin.client.safe_text import replace_unsafe, safe_text
from loramux.admin.exit_codes import REFUSED, UNREACHABLE, WRONG_CALL

if TYPE_CHECKING:
    from loramux.admin.client.client import AdminClient, Document
    from loramux.admin.client.named_adapter import NamedAdapter

Columns = Mapping[str, str | Callable[[dict[str, Any]], object]]
"""A table's columns by title. A column is a field name, or a function that computes the cell from the item."""

_ADVICE: Mapping[str, str] = {
    "tenant_not_found": ": loramux tenants list shows all tenants, and loramux tenants create adds one",
}
"""What to do after an error that the server reports, by its code."""


@contextmanager
def connected(as_json: bool) -> Iterator[AdminClient]:
    """Connect to the configured server. If a call fails, print a message and exit with an error code."""
    from loramux.admin.client.client import AdminClient, AdminError, ServerUnreachable, WrongCall
    from loramux.admin.commands.root import chosen_profile

    try:
        with AdminClient.from_environment(chosen_profile.get()) as client:
            yield client
    except AdminError as error:
        is_limit = error.status == 429 and error.retry_after_s is not None
        again = f": try again in {error.retry_after_s} s" if is_limit else ""
        advice = _ADVICE.get(error.code or "", "")
        exit_code = WRONG_CALL if isinstance(error, WrongCall) else REFUSED
        fail(error.message + again + advice, exit_code, error.envelope() if as_json else None)
    except ServerUnreachable as error:
        fail(str(error), UNREACHABLE, error_document(str(error), "server_unreachable") if as_json else None)


@contextmanager
def connected_to(
    model: str, as_json: bool, *, needs_version: bool = False
) -> Iterator[tuple[AdminClient, NamedAdapter]]:
    """Like `connected`, but also look up the adapter or version that `model` names."""
    from loramux.admin.client.named_adapter import find_named

    with connected(as_json) as client:
        yield client, find_named(client, model, needs_version=needs_version)


def fail(message: str, exit_code: int, document: Document | None = None) -> NoReturn:
    """Report an error and exit. If `document` is given, print it as JSON on standard output."""
    if document is not None:
        print_json(document)
    else:
        for line in message.splitlines():
            print_text(f"loramux: {line}", file=sys.stderr)
    raise typer.Exit(exit_code)


def ask(question: str, *, hides_answer: bool = False) -> str:
    """Ask on standard error, and return the line that is typed. Ctrl-C and Ctrl-D interrupt the command."""
    try:
        return str(typer.prompt(safe_text(question), hide_input=hides_answer, err=True))
    except typer.Abort:
        raise KeyboardInterrupt from None


def located(message: str, param: str | None) -> str:
    """Add the file, key or tensor at fault to an error's message, unless the message names it."""
    return message if param is None or param in message else f"{message} [{param}]"


def error_document(message: str, code: str | None, param: str | None = None) -> Document:
    """Return a client-side error in the format of the server's error envelope."""
    return {"error": {"message": message, "code": code, "param": param}}


def print_text(text: str = "", file: TextIO | None = None, flush: bool = False) -> None:
    """Print text, by default to standard output. Characters that could control a terminal are replaced."""
    print(safe_text(text), file=file or sys.stdout, flush=flush)


def print_exact(text: str) -> None:
    """Print a server's document byte for byte, unless standard output is a terminal."""
    sys.stdout.write(safe_text(text) if sys.stdout.isatty() else text)


def print_json(document: object) -> None:
    print(json_text(document, indent=2))  # noqa: T201


def json_text(document: object, indent: int | None = None) -> str:
    """Return a document as JSON for standard output.

    Letters that its encoding may lack, and characters that could control a terminal, are escaped as in JSON.
    """
    is_unicode = (sys.stdout.encoding or "utf-8").lower().startswith("utf")
    text = json.dumps(document, indent=indent, ensure_ascii=not is_unicode)
    return replace_unsafe(text, lambda one: json.dumps(one)[1:-1])


def tell(document: object, sentence: str, as_json: bool) -> None:
    """Print a command's result as a sentence, or as JSON."""
    print_json(document) if as_json else print_text(sentence)


def print_list(document: Document, columns: Columns, as_json: bool) -> None:
    if as_json:
        print_json(document)
        return
    cells = [itemgetter(of) if isinstance(of, str) else of for of in columns.values()]
    print_table(tuple(columns), [[cell(item) for cell in cells] for item in document["data"]])


def print_warnings(warnings: Iterable[Document], file: TextIO | None = None) -> None:
    """Print the warnings of a validation report, by default to standard error."""
    for warning in warnings:
        where = f" ({warning['count']}: {', '.join(warning['params'])})" if warning["params"] else ""
        print_text(f"warning: {warning['message']}{where}", file=file or sys.stderr)


def time_in(name: str) -> Callable[[Document], object]:
    return lambda item: shown_time(item[name])


def print_table(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Print a table without truncation. On a terminal that is too narrow, print each row vertically.

    In a two-column table, the second column wraps instead.
    """
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console()
    # Tenants choose the names, so show them literally and never interpret them as markup.
    titles = [Text(safe_text(column)) for column in columns]
    cells = [[Text("-" if value is None else safe_text(str(value))) for value in row] for row in rows]
    table = Table(box=None, pad_edge=False, header_style="bold")
    for at, title in enumerate(titles):
        table.add_column(title, no_wrap=len(columns) != 2 or at == 0, overflow="fold")
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
        for title, cell in zip(titles, row, strict=True):
            one.add_row(title, cell)
        console.print(one)


def print_csv(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Print CSV (RFC 4180). A missing value is an empty cell. Cells must not contain text supplied by tenants."""
    text = io.StringIO()
    writer = csv.writer(text)
    writer.writerow(columns)
    writer.writerows(rows)
    print_exact(text.getvalue())


def shown_time(seconds: int | None) -> str | None:
    return None if seconds is None else datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M:%SZ")
