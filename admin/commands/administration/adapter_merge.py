"""`loramux adapters merge`: merge several adapters into a new version."""

from __future__ import annotations

from typing import Annotated

import typer

from loramux.admin.commands.options import AsJson
from loramux.admin.commands.output import connected, error_document, fail, located, print_warnings, tell
from loramux.admin.commands.transfer_progress import transfer_progress
from loramux.admin.exit_codes import REFUSED, WRONG_CALL


def merge(
    sources: Annotated[
        list[str],
        typer.Argument(
            metavar="TENANT/ADAPTER[@VERSION][=WEIGHT]...",
            help="2 to 16 adapters of one tenant; the weight is 1 by default.",
        ),
    ],
    into: Annotated[str, typer.Option(metavar="TENANT/ADAPTER", help="The adapter that gets the new version.")],
    method: Annotated[
        str, typer.Option(help="linear, cat, ties, dare_linear or dare_ties: how the weights are combined.")
    ] = "linear",
    density: Annotated[
        float, typer.Option(help="Share of each matrix's values to keep, for ties and the dare methods.")
    ] = 1.0,
    sign_rule: Annotated[
        str, typer.Option(help="total or frequency: how ties and dare_ties find the majority sign.")
    ] = "total",
    seed: Annotated[
        int, typer.Option(help="Random seed for the dare methods, which keep values at random.", min=0)
    ] = 0,
    timeout_s: Annotated[float, typer.Option("--timeout", help="Seconds to wait for validation.")] = 300.0,
    as_json: AsJson = False,
) -> None:
    """Merge several adapters of one tenant into a new version, as PEFT's add_weighted_adapter does.

    The files are downloaded, merged on this machine in float32, and pushed like any adapter. cat computes the exact
    weighted sum, with the sum of all ranks as its rank. The other methods are approximations and need equal ranks. The
    new version gets the optional files of the first adapter, such as its chat template.
    """
    from loramux.adapter_store.errors import MergeRefused
    from loramux.adapter_store.merging.methods import MergeMethod, MergeSettings, SignRule
    from loramux.admin.client.merge import Merge, merge_versions
    from loramux.admin.client.pull import PullRefused
    from loramux.admin.client.push import PushRefused

    # Typer could check an enum itself, but the enum's module imports numpy, and `loramux --help` should not.
    if method not in set(MergeMethod):
        offered = ", ".join(MergeMethod)
        raise typer.BadParameter(f"{method!r} is not offered; choose {offered}", param_hint="--method")
    if sign_rule not in set(SignRule):
        raise typer.BadParameter("choose total or frequency", param_hint="--sign-rule")
    exit_code = WRONG_CALL
    try:
        settings = MergeSettings(MergeMethod(method), density, SignRule(sign_rule), seed)
        wanted = Merge.parse(sources, into)
        exit_code = REFUSED
        with connected(as_json) as client, transfer_progress(None, as_json) as progress:
            merged = merge_versions(client, wanted, settings, timeout_s, progress)
    except (MergeRefused, PushRefused) as error:
        document = error_document(error.message, error.code, error.param)
        fail(f"refused ({error.code}): {located(error.message, error.param)}", exit_code, document if as_json else None)
    except (PullRefused, OSError) as error:
        fail(str(error), REFUSED, error_document(str(error), "pull_refused") if as_json else None)
    pushed = merged.pushed
    shown = " + ".join(f"{source.weight:g} {source.model}" for source in merged.sources)
    document = {
        "model": pushed.model,
        "version": pushed.version,
        "digest": pushed.digest,
        "version_digest": pushed.version_digest,
        "method": method,
        "sources": [{"model": source.model, "weight": source.weight} for source in merged.sources],
    }
    if as_json:
        document["warnings"] = list(pushed.warnings)
    else:
        print_warnings(pushed.warnings)
    tell(document, f"{pushed.model} version {pushed.version} is {shown} ({method}, rank {pushed.max_rank})", as_json)
