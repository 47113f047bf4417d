"""`loramux adapters promote|rollback|disable|enable|archive|restore`: choose which versions serve requests."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from loramux.admin.commands.administration.adapter_views import shown_divergence, shown_targets
from loramux.admin.commands.options import Alias, AsJson, Model, NoWarm, VersionedModel
from loramux.admin.commands.output import connected, connected_to, fail, print_text, tell
from loramux.admin.exit_codes import WRONG_CALL

if TYPE_CHECKING:
    from loramux.admin.client.client import AdminClient, Document
    from loramux.admin.client.named_adapter import NamedAdapter

DEFAULT_SCORE, DEFAULT_REQUESTS = 1.0, 20
FULL_SHARE = 100


def promote(
    model: VersionedModel,
    alias: Alias = "default",
    percent: Annotated[
        int, typer.Option("--percent", min=1, max=100, help="Percentage of requests; current versions keep the rest.")
    ] = FULL_SHARE,
    require_eval: Annotated[
        Path | None,
        typer.Option(
            "--require-eval",
            metavar="FILE.jsonl",
            help="From now on, refuse versions that have not passed it.",
        ),
    ] = None,
    min_score: Annotated[
        float | None,
        typer.Option(
            "--min-score", min=0, max=1, help="The score that --require-eval demands (default: 1).", show_default=False
        ),
    ] = None,
    judge: Annotated[
        str | None,
        typer.Option("--judge", metavar="MODEL", help="The judge that --require-eval demands, for lines with 'judge'."),
    ] = None,
    no_require_eval: Annotated[
        bool, typer.Option("--no-require-eval", help="Demand no eval any more, for this and later moves.")
    ] = False,
    max_error_rate: Annotated[
        float | None,
        typer.Option("--max-error-rate", min=0, max=0.99, help="Roll back if a larger share of its requests fails."),
    ] = None,
    max_first_token: Annotated[
        float | None,
        typer.Option("--max-first-token", min=0.001, help="Roll back if p95 to the first token is longer, in seconds."),
    ] = None,
    min_requests: Annotated[
        int | None,
        typer.Option(
            "--min-requests",
            min=1,
            max=1000,
            help="Requests from which these bounds count (default: 20).",
            show_default=False,
        ),
    ] = None,
    overflow: Annotated[
        str | None,
        typer.Option("--overflow", metavar="MODEL", help="From now on, this model answers what would be refused."),
    ] = None,
    no_overflow: Annotated[bool, typer.Option("--no-overflow", help="From now on, no other model answers.")] = False,
    share_base_cache: Annotated[
        int | None,
        typer.Option(
            "--share-base-cache",
            metavar="TOKENS",
            min=1,
            help="From now on, the base computes prompts up to their last TOKENS tokens (approximate).",
        ),
    ] = None,
    no_share_base_cache: Annotated[
        bool, typer.Option("--no-share-base-cache", help="From now on, the adapter computes whole prompts.")
    ] = False,
    no_warm: NoWarm = False,
    as_json: AsJson = False,
) -> None:
    """Point an alias at a version, or send a share of the alias's requests to it. Running requests are not affected."""
    from loramux.admin.client.client import AdminError, loading_timeout_s
    from loramux.admin.client.eval_file import read_eval_file
    from loramux.admin.client.named_adapter import find_named

    if require_eval is not None and no_require_eval:
        fail("--require-eval and --no-require-eval contradict each other", WRONG_CALL)
    if overflow is not None and no_overflow:
        fail("--overflow and --no-overflow contradict each other", WRONG_CALL)
    if share_base_cache is not None and no_share_base_cache:
        fail("--share-base-cache and --no-share-base-cache contradict each other", WRONG_CALL)
    has_bounds = max_error_rate is not None or max_first_token is not None
    # Ignored options would leave an alias without the check that the caller relies on.
    if min_score is not None and require_eval is None:
        fail("--min-score needs --require-eval", WRONG_CALL)
    if judge is not None and require_eval is None:
        fail("--judge needs --require-eval", WRONG_CALL)
    if min_requests is not None and not has_bounds:
        fail("--min-requests needs --max-error-rate or --max-first-token", WRONG_CALL)
    body: Document = {"warm": not no_warm}
    if has_bounds:
        bounds = {"max_error_rate": max_error_rate, "max_first_token_s": max_first_token}
        body["canary"] = {**bounds, "min_requests": DEFAULT_REQUESTS if min_requests is None else min_requests}
    if no_require_eval:
        body["require_eval"] = None
    if overflow is not None or no_overflow:
        body["overflow"] = overflow
    if share_base_cache is not None or no_share_base_cache:
        body["share_base_cache"] = share_base_cache

    with connected(as_json) as client:
        if require_eval is not None:
            given = read_eval_file(require_eval)
            demanded = DEFAULT_SCORE if min_score is None else min_score
            body["require_eval"] = {"sha256": given.sha256, "name": given.name, "min_score": demanded}
            if judge is not None:
                # A server from before judges were part of a demand refuses the field.
                body["require_eval"]["judge"] = judge
        named = find_named(client, model, needs_version=True)
        assert named.version is not None
        path = f"{named.path}/{client.path('aliases', alias)}"
        targets = [{"version": named.version, "weight": FULL_SHARE}]
        if_match: str | None = None
        if percent < FULL_SHARE:
            try:
                present = client.get(path)
            except AdminError as error:
                if error.status != 404:
                    raise
                fail(f"{model} has no alias {alias} that could keep the other requests: omit --percent", WRONG_CALL)
            targets = _share_out(present["targets"], named.version, percent)
            # If the alias moves in between, such as by a rollback, these targets would undo that.
            if_match = f'"{present["revision"]}"'
        body["targets"] = targets
        _tell(named.document, client.put(path, body, loading_timeout_s(len(targets)), if_match=if_match), as_json)
        if share_base_cache is not None and not as_json:
            _tell_divergence(client, named, share_base_cache)


def rollback(
    model: Model,
    alias: Alias = "default",
    revision: Annotated[
        int | None, typer.Option(help="Revision to return to (default: before the last move).", show_default=False)
    ] = None,
    no_warm: NoWarm = False,
    as_json: AsJson = False,
) -> None:
    """Undo an alias's last move, or return to a given revision. A second rollback undoes the first."""
    from loramux.admin.client.client import MAX_VERSIONS, loading_timeout_s

    with connected_to(model, as_json) as (client, named):
        path = f"{named.path}/{client.path('aliases', alias, 'rollback')}"
        body: Document = {"revision": revision, "warm": not no_warm}
        changed = client.post(path, body, loading_timeout_s(MAX_VERSIONS))
    _tell(named.document, changed, as_json)


def disable(model: Model, as_json: AsJson = False) -> None:
    """Take an adapter and all its versions out of service. Running requests finish and nothing is deleted."""
    _switch(model, "disable", as_json)


def enable(model: Model, as_json: AsJson = False) -> None:
    """Put a disabled adapter back into service."""
    _switch(model, "enable", as_json)


def archive(model: VersionedModel, as_json: AsJson = False) -> None:
    """Take a version out of service. This is refused while an alias points at it."""
    _move_version(model, "archive", as_json)


def restore(model: VersionedModel, as_json: AsJson = False) -> None:
    """Put an archived version back into service."""
    _move_version(model, "restore", as_json)


def _switch(model: str, verb: str, as_json: bool) -> None:
    with connected_to(model, as_json) as (client, named):
        answer = client.post(f"{named.path}/{verb}", {})
    tell(answer, f"{answer['model']} is {answer['state']}{_draining(answer)}", as_json)


def _move_version(model: str, verb: str, as_json: bool) -> None:
    with connected_to(model, as_json, needs_version=True) as (client, named):
        answer = client.post(f"{named.version_path()}/{verb}", {})
    name = f"{named.document['model']}@{answer['number']}"
    tell(answer, f"{name} is {answer['state']}{_draining(answer)}", as_json)


def _draining(answer: Document) -> str:
    return "" if answer.get("drained", True) else "; running requests are still finishing on it"


def _share_out(present: list[Document], version: int, percent: int) -> list[Document]:
    """Return weights that send `percent` % of the requests to the version. Other versions keep their proportions."""
    others = [target for target in present if target["version"] != version]
    total = sum(target["weight"] for target in others)
    if not others:
        return [{"version": version, "weight": FULL_SHARE}]
    rest = FULL_SHARE * (FULL_SHARE - percent)
    weights = [{"version": target["version"], "weight": max(1, target["weight"] * rest // total)} for target in others]
    return [*weights, {"version": version, "weight": FULL_SHARE * percent}]


def _tell_divergence(client: AdminClient, named: NamedAdapter, num_own: int) -> None:
    """Say how much sharing the base's cache changes the version, or how to measure it."""
    from loramux.admin.client.client import AdminError, ServerUnreachable

    try:
        evals = client.whole_list(f"{named.path}/evals", version=named.version)["data"]
    except (AdminError, ServerUnreachable) as error:
        # The alias has moved.
        print_text(f"loramux: the evals cannot be listed: {error}", file=sys.stderr)
        return
    found = next((one for one in evals if one["share_base_cache"] == num_own and one["divergence"] is not None), None)
    if found is not None:
        print_text(f"divergence in {found['name']}: {shown_divergence(found)}")
        return
    measure = f"loramux eval {named.document['model']}@{named.version} FILE.jsonl --share-base-cache {num_own}"
    print_text(f"the divergence is not known: measure it with {measure}")


def _tell(adapter: Document, alias: Document, as_json: bool) -> None:
    shown = shown_targets(alias["targets"])
    tell(alias, f"{adapter['model']}: {alias['name']} is now {shown} (revision {alias['revision']})", as_json)
