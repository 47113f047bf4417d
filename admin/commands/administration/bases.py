"""`loramux bases`: the base models registered in the database, their servers, and the versions validated for each."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated

import typer

from loramux.admin.commands.options import AsJson
from loramux.admin.commands.output import (
    Columns,
    connected,
    error_document,
    fail,
    print_list,
    print_text,
    tell,
    time_in,
)
from loramux.admin.exit_codes import REFUSED, WRONG_CALL

if TYPE_CHECKING:
    from loramux.admin.client.client import AdminClient, Document

app = typer.Typer(no_args_is_help=True, help="Show and maintain the base models registered in the database.")

BaseStart = Annotated[str, typer.Argument(help="The start of the base's identifier.")]

NUM_SHOWN = 16
"""Number of characters of a base's identifier that are shown."""
MAX_WEIGHT_DIGITS = 9


@app.command("list")
def list_bases(as_json: AsJson = False) -> None:
    """List the bases with their servers, and how many ready versions were validated for each."""
    with connected(as_json) as client:
        bases = client.get("bases")
    columns: Columns = {
        "base": lambda base: base["id"][:NUM_SHOWN] + (" (this server)" if base["is_own"] else ""),
        "served name": "served_name",
        "validated": "num_validated",
        "rejected": "num_rejected",
        "pending": "num_pending",
        "weight": lambda base: "" if base["weight"] is None else base["weight"],
        "servers": lambda base: ", ".join(f"{one['address']} ({one['state']})" for one in base["servers"]) or "none",
        "first seen": time_in("created_at"),
    }
    print_list(bases, columns, as_json)


@app.command()
def rejected(base: BaseStart, as_json: AsJson = False) -> None:
    """List the ready versions that failed validation for a base, newest first, with the reasons."""
    with connected(as_json) as client:
        versions = client.whole_list(client.path("bases", _find(client, base, as_json), "rejected"))
    columns: Columns = {
        "version": lambda one: f"{one['tenant']}/{one['adapter']}@{one['version']}",
        "code": "code",
        "reason": "message",
        "checked": time_in("checked_at"),
    }
    print_list(versions, columns, as_json)


@app.command()
def revalidate(base: BaseStart, as_json: AsJson = False) -> None:
    """Validate a base's rejected versions again, for example after an upgrade that accepts them."""
    with connected(as_json) as client:
        answer = client.post(client.path("bases", _find(client, base, as_json), "revalidate"), {})
    number = answer["num_revalidated"]
    waiting = f"{number} {'version waits' if number == 1 else 'versions wait'} for validation"
    tell(answer, f"{answer['id'][:NUM_SHOWN]}: {waiting}; 'loramux bases list' shows the progress", as_json)


@app.command()
def weight(
    weights: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="BASE=WEIGHT...",
            help="The start of each base's identifier, and its share of the requests; 0 leaves it without requests.",
        ),
    ] = None,
    clear: Annotated[
        bool, typer.Option("--clear", help="Remove all weights: each server runs requests only on its own base.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Divide requests between bases by weight, for example between an old and a new version of a model.

    The servers of these bases must share requests. The command replaces all weights.
    """
    if bool(weights) == clear:
        fail("give the weights of at least two bases, such as 3f9c=90 1b07=10, or --clear", WRONG_CALL)
    with connected(as_json) as client:
        body = [_weight(client, text, as_json) for text in weights or ()]
        bases = client.put("bases/weights", {"weights": body})
    for base in bases["data"]:
        if base["weight"] is not None and not base["is_shared"]:
            reason = "none of its servers shares requests: see 'loramux serve --peer-address'"
            print_text(
                f"loramux: the weight of base {base['id'][:NUM_SHOWN]} has no effect yet: {reason}", file=sys.stderr
            )
    shares = {base["id"]: base["weight"] for base in bases["data"] if base["weight"] is not None}
    total = sum(shares.values())
    shown = ", ".join(f"{base_id[:NUM_SHOWN]} {100 * share / total:.3g} %" for base_id, share in shares.items())
    tell(
        bases, f"requests are divided: {shown}" if shown else "each server runs requests only on its own base", as_json
    )


def _weight(client: AdminClient, text: str, as_json: bool) -> Document:
    start, _, number = text.partition("=")
    if not (start and number.isascii() and number.isdecimal() and len(number) <= MAX_WEIGHT_DIGITS):
        fail(f"{text!r} is not BASE=WEIGHT, with a whole number of at most {MAX_WEIGHT_DIGITS} digits", WRONG_CALL)
    return {"base": _find(client, start, as_json), "weight": int(number)}


@app.command()
def forget(base: BaseStart, as_json: AsJson = False) -> None:
    """Forget a base that no server serves any more, and delete its validation results."""
    with connected(as_json) as client:
        base_id = _find(client, base, as_json)
        client.delete(client.path("bases", base_id))
    tell({"object": "base", "id": base_id, "deleted": True}, f"forgot base {base_id[:NUM_SHOWN]}", as_json)


def _find(client: AdminClient, start: str, as_json: bool) -> str:
    found: list[str] = [base["id"] for base in client.get("bases")["data"] if base["id"].startswith(start)]
    if len(found) != 1:
        reason = "several bases have" if found else "no base has"
        message = f"{reason} an identifier that starts with {start!r}: see 'loramux bases list'"
        fail(message, REFUSED, error_document(message, "base_not_found", "base") if as_json else None)
    return found[0]
