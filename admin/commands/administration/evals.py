"""`loramux eval` runs a version on a file of prompts; `loramux evals` lists, shows and cancels such runs."""

from __future__ import annotations

import sys
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from loramux.admin.commands.administration.adapter_views import shown_divergence, shown_sharing
from loramux.admin.commands.options import AsJson, VersionedModel
from loramux.admin.commands.output import (
    Columns,
    connected,
    connected_to,
    fail,
    print_json,
    print_list,
    print_table,
    print_text,
    tell,
    time_in,
)
from loramux.admin.commands.progress import counted_progress
from loramux.admin.exit_codes import REFUSED

if TYPE_CHECKING:
    from loramux.admin.client.client import AdminClient, Document

app = typer.Typer(no_args_is_help=True, help="List, show and cancel evals; 'loramux eval' starts one.")

POLL_S = 0.5
MAX_SHOWN = 10
"""Number of lines without a pass that are shown."""

EvalId = Annotated[str, typer.Argument(metavar="EVAL", help="The eval's identifier, evl_...")]


def evaluate(
    model: VersionedModel,
    file: Annotated[Path, typer.Argument(metavar="FILE.jsonl", help="One JSON object per line.")],
    compare: Annotated[
        int | None, typer.Option("--compare", min=1, help="Another version to run on the same prompts.")
    ] = None,
    share_base_cache: Annotated[
        int | None,
        typer.Option(
            "--share-base-cache",
            metavar="TOKENS",
            min=1,
            help="Compare with the version behind an alias that has this option, and measure the divergence.",
        ),
    ] = None,
    judge: Annotated[
        str | None, typer.Option("--judge", help="Model that judges answers, for lines with 'judge'.")
    ] = None,
    min_score: Annotated[
        float | None, typer.Option("--min-score", min=0, max=1, help="Exit with code 1 if the score is lower.")
    ] = None,
    no_wait: Annotated[bool, typer.Option("--no-wait", help="Return once the eval is queued.")] = False,
    as_json: AsJson = False,
) -> None:
    """Run a version on a file of prompts with expected answers, behind all other requests, and store the scores."""
    from loramux.admin.client.eval_file import read_eval_file
    from loramux.admin.client.named_adapter import find_named
    from loramux.admin.client.retries import retry_read

    with connected(as_json) as client:
        given = read_eval_file(file)
        named = find_named(client, model, needs_version=True)
        body: Document = {"name": given.name, "file": given.text, "compare": compare, "judge": judge}
        body["share_base_cache"] = share_base_cache
        found = client.post(f"{named.version_path()}/evals", body)
        if no_wait:
            tell(found, f"{found['id']} is queued: loramux evals show {found['id']}", as_json)
            return
        print_text(f"loramux: {found['id']} is queued: loramux evals show|cancel {found['id']}", file=sys.stderr)
        found = _followed(client, found, as_json)
        _print(found, retry_read(partial(_answers, client, found["id"])), as_json)
    score = found["score"]
    if found["state"] != "done" or (min_score is not None and (score is None or score < min_score)):
        raise typer.Exit(REFUSED)


@app.command("list")
def list_evals(
    model: Annotated[
        str, typer.Argument(metavar="TENANT/ADAPTER[@VERSION]", help="An adapter, or one of its versions.")
    ],
    as_json: AsJson = False,
) -> None:
    """List the evals of an adapter, newest first."""
    with connected_to(model, as_json) as (client, named):
        found = client.whole_list(f"{named.path}/evals", version=named.version)
    columns: Columns = {
        "id": "id",
        "version": "version",
        "file": "name",
        "state": "state",
        "score": lambda one: shown_score(one["score"]),
        "passed": lambda one: _passed(one, "num_passed"),
        "compared": _compared,
        "made": time_in("created_at"),
    }
    print_list(found, columns, as_json)


@app.command()
def show(eval_id: EvalId, as_json: AsJson = False) -> None:
    """Show an eval's scores and the lines that did not pass. With --json, show every answer."""
    with connected(as_json) as client:
        _print(client.get(client.path("evals", eval_id)), _answers(client, eval_id), as_json)


@app.command()
def cancel(eval_id: EvalId, as_json: AsJson = False) -> None:
    """Cancel an eval that has not finished. Its answers so far are kept."""
    with connected(as_json) as client:
        found = client.post(client.path("evals", eval_id, "cancel"), {})
    tell(found, f"{eval_id} is {found['state']}", as_json)


def _compared(found: Document) -> str | None:
    score, num_own = shown_score(found["compare_score"]), found["share_base_cache"]
    if num_own is None:
        return found["compare"] and f"{found['compare']}: {score}"
    divergence = "" if found["num_measured"] is None else f"; divergence: {shown_divergence(found)}"
    return f"{shown_sharing(num_own)}: {score}{divergence}"


def shown_score(score: float | None) -> str | None:
    return None if score is None else f"{score:.3f}"


def _followed(client: AdminClient, found: Document, as_json: bool) -> Document:
    """Poll an eval until it ends."""
    from loramux.admin.client.retries import retry_read

    path = client.path("evals", found["id"])
    num_sides = 1 if found["compare"] is None and found["share_base_cache"] is None else 2
    num_answers = found["num_cases"] * num_sides
    try:
        with counted_progress(num_answers, "answers", as_json) as advance:
            while found["state"] in ("queued", "running"):
                time.sleep(POLL_S)
                found = retry_read(partial(client.get, path))
                advance(found["num_answers"])
    except KeyboardInterrupt:
        print_text(f"loramux: the eval goes on: loramux evals show|cancel {found['id']}", file=sys.stderr)
        raise
    return found


def _print(found: Document, answers: list[Document], as_json: bool) -> None:
    if as_json:
        print_json({**found, "answers": answers})
        return
    if found["error"]:
        fail(f"the eval failed: {found['error']['message']}", REFUSED)
    rows: list[tuple[object, ...]] = [_result(found, found["version"], "score", "num_passed")]
    if found["compare"] is not None:
        rows.append(_result(found, found["compare"], "compare_score", "compare_num_passed"))
    if found["share_base_cache"] is not None:
        rows.append(
            (_compared_form(found), *_result(found, found["version"], "compare_score", "compare_num_passed")[1:])
        )
    print_text(f"{found['id']} {found['state']}: {found['name']}")
    print_table(("model", "score", "passed"), rows)
    if found["num_measured"] is not None:
        print_text(f"divergence: {shown_divergence(found)}")
    missed = [one for one in answers if not one["passed"]]
    if missed:
        shown = missed[:MAX_SHOWN]
        print_text()
        print_table(
            ("line", "version", "score", "answer", "why"),
            [
                (one["line"], _version(one), shown_score(one["score"]), _short(one["answer"]), one["detail"])
                for one in shown
            ],
        )
    if len(missed) > MAX_SHOWN:
        print_text(f"and {len(missed) - MAX_SHOWN} more: loramux evals show {found['id']} --json")


def _compared_form(found: Document) -> str:
    return f"{found['model']}@{found['version']}, {shown_sharing(found['share_base_cache'])}"


def _version(answer: Document) -> str:
    return f"{answer['version']}{', shared' if answer['shared'] else ''}"


def _result(found: Document, version: int, score: str, passed: str) -> tuple[object, ...]:
    return f"{found['model']}@{version}", shown_score(found[score]), _passed(found, passed)


def _passed(found: Document, field: str) -> str | None:
    return None if found[field] is None else f"{found[field]}/{found['num_cases']}"


def _short(text: str) -> str:
    shown = "".join(one if one.isprintable() else " " for one in text)
    return shown if len(shown) <= 60 else f"{shown[:57]}..."


def _answers(client: AdminClient, eval_id: str) -> list[Document]:
    answers, after = [], 0
    while True:
        page = client.get(client.path("evals", eval_id, "answers"), after_line=after)
        answers += page["data"]
        if not page["has_more"]:
            return answers
        after = page["data"][-1]["line"]
