from __future__ import annotations

import errno
import json
import os
import re
import threading
from pathlib import Path
from typing import Any

import pytest

from loramux.adapter_store.registry.eval_claims import EvalClaims
from loramux.adapter_store.registry.evals import PPM, EvalAnswer
from loramux.admin.client.client import AdminClient, AdminError, ServerUnreachable
from loramux.admin.commands.administration.aliases import _canary
from tests.admin.admin_side import AdminSide
from tests.admin.command_line import Run, printed_json
from tests.admin.failing_calls import fail_first
from tests.admin.finished_evals import CONTENT, SHA256, add_finished_eval
from tests.admin.rest.adapters.ready_versions import add_ready_versions


@pytest.fixture
def adapter_id(admin_side: AdminSide) -> str:
    services = admin_side.services
    adapter = services.adapters.registry.create_adapter(services.accounts.tenants.create("acme").id, "support")
    add_ready_versions(services.database, adapter.id, 2)
    return adapter.id


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "tests.jsonl"
    path.write_bytes(CONTENT)
    return path


def run_in_background(side: AdminSide, passed: int, error: str = "") -> threading.Thread:
    """Stand in for the server that runs the next eval."""

    def run() -> None:
        claims = EvalClaims(side.services.database)
        while (claimed := claims.claim()) is None:
            pass
        for line in range(1, 5):
            claims.record(
                claimed.eval.id, EvalAnswer(line, 0, PPM * (line <= passed), line <= passed, "a\x1b[31mb", "no")
            )
        claims.fail(claimed.eval.id, "model_not_found", error) if error else claims.finish(claimed.eval.id)

    thread = threading.Thread(target=run)
    thread.start()
    return thread


@pytest.mark.parametrize(("bound", "exit_code"), [(0.5, 0), (0.9, 1)])
def test_eval_waits_for_the_scores(
    loramux: Run, admin_side: AdminSide, adapter_id: str, file: Path, bound: float, exit_code: int
) -> None:
    thread = run_in_background(admin_side, passed=3)
    done = loramux("eval", "acme/support@1", file, "--min-score", bound)
    thread.join()
    assert done.exit_code == exit_code, done.output
    assert "acme/support@1  0.750  3/4" in done.stdout
    assert "a [31mb" in done.stdout
    assert "\x1b[31m" not in done.stdout


def test_failed_eval_says_why(loramux: Run, admin_side: AdminSide, adapter_id: str, file: Path) -> None:
    thread = run_in_background(admin_side, passed=0, error="The model 'x' does not exist")
    done = loramux("eval", "acme/support@1", file)
    thread.join()
    assert done.exit_code == 1
    assert done.stderr.endswith("loramux: the eval failed: The model 'x' does not exist\n")


def test_eval_survives_a_restart_of_the_server(
    loramux: Run, admin_side: AdminSide, adapter_id: str, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone = ServerUnreachable("no server answers"), AdminError(502, "the server returned 502", None, None)
    fail_first(monkeypatch, AdminClient, "get", *gone, where="evals/evl_")
    fail_first(monkeypatch, AdminClient, "get", *gone, where="/answers")
    thread = run_in_background(admin_side, passed=3)
    done = loramux("eval", "acme/support@1", file)
    thread.join()
    assert done.exit_code == 0, done.output
    assert re.fullmatch(r"loramux: (evl_\w+) is queued: loramux evals show\|cancel \1\n", done.stderr)


def test_queued_eval_is_shown_and_cancelled(loramux: Run, adapter_id: str, file: Path) -> None:
    queued = printed_json(loramux("eval", "acme/support@1", file, "--compare", 2, "--no-wait", "--json"))
    assert (queued["state"], queued["compare"], queued["sha256"]) == ("queued", 2, SHA256)
    listed = printed_json(loramux("evals", "list", "acme/support@1", "--json"))["data"]
    assert listed == [queued]
    assert printed_json(loramux("evals", "list", "acme/support@2", "--json"))["data"] == []
    assert printed_json(loramux("evals", "cancel", queued["id"], "--json"))["state"] == "cancelled"
    assert "cancelled" in loramux("evals", "show", queued["id"]).stdout


def test_scores_are_shown_with_the_versions(loramux: Run, admin_side: AdminSide, adapter_id: str) -> None:
    add_finished_eval(admin_side.services.database, adapter_id, 2, passed=1)
    eval_id = add_finished_eval(admin_side.services.database, adapter_id, 2, passed=4, compared=1, others=2)
    assert "1.000 tests.jsonl" in loramux("adapters", "show", "acme/support").stdout
    assert "1: 0.500" in loramux("evals", "list", "acme/support").stdout
    shown = loramux("evals", "show", eval_id).stdout
    assert "acme/support@1  0.500  2/4" in shown
    assert len(printed_json(loramux("evals", "show", eval_id, "--json"))["answers"]) == 8


def test_promotion_demands_an_eval(loramux: Run, admin_side: AdminSide, adapter_id: str, file: Path) -> None:
    demand = ("--require-eval", file, "--min-score", 0.75, "--judge", "the-base", "--no-warm")
    refused = loramux("adapters", "promote", "acme/support@2", *demand)
    assert refused.exit_code == 1
    assert "version 2 has no finished eval of tests.jsonl, which the alias demands: run it first" in refused.stderr
    add_finished_eval(admin_side.services.database, adapter_id, 2, passed=3, judge="the-base")
    moved = loramux("adapters", "promote", "acme/support@2", *demand, "--percent", 10, "--max-error-rate", 0.05)
    assert moved.exit_code == 0, moved.output
    [alias] = printed_json(loramux("aliases", "list", "acme/support", "--json"))["data"]
    assert alias["require_eval"] == {"sha256": SHA256, "name": "tests.jsonl", "min_score": 0.75, "judge": "the-base"}
    assert alias["canary"]["versions"] == [2]
    shown = loramux("aliases", "list", "acme/support").stdout
    assert "tests.jsonl 0.750 judged by the-base" in shown
    assert "watching" in shown
    aliases = admin_side.services.adapters.aliases
    aliases.fail_canary(adapter_id, "default", alias["revision"], [2], "version 2: slow")
    assert "rolled back: version 2: slow" in loramux("aliases", "list", "acme/support").stdout
    free = loramux("adapters", "promote", "acme/support@1", "--no-require-eval", "--no-warm", "--json")
    assert printed_json(free)["require_eval"] is None
    both = loramux("adapters", "promote", "acme/support@1", *demand, "--no-require-eval")
    assert both.exit_code == 2


def test_demand_without_a_judge_names_none(
    loramux: Run, admin_side: AdminSide, adapter_id: str, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server from before judges were part of a demand refuses the field."""
    bodies: list[Any] = []
    put = AdminClient.put

    def keep(self: AdminClient, path: str, body: Any, *options: Any, **named: Any) -> Any:
        bodies.append(body)
        return put(self, path, body, *options, **named)

    monkeypatch.setattr(AdminClient, "put", keep)
    add_finished_eval(admin_side.services.database, adapter_id, 2, passed=4)
    moved = loramux("adapters", "promote", "acme/support@2", "--require-eval", file, "--no-warm")
    assert moved.exit_code == 0, moved.output
    assert bodies[0]["require_eval"] == {"sha256": SHA256, "name": "tests.jsonl", "min_score": 1.0}


@pytest.mark.parametrize(
    ("option", "needed"),
    [("--min-score", "--require-eval"), ("--judge", "--require-eval"), ("--min-requests", "--max-error-rate")],
)
def test_a_bound_of_a_check_that_is_not_demanded_moves_nothing(
    loramux: Run, adapter_id: str, option: str, needed: str
) -> None:
    before = loramux("aliases", "list", "acme/support").stdout
    refused = loramux("adapters", "promote", "acme/support@2", option, 1, "--no-warm")
    assert (refused.exit_code, f"{option} needs {needed}" in refused.stderr) == (2, True)
    assert loramux("aliases", "list", "acme/support").stdout == before


@pytest.mark.parametrize(
    "content", [None, b"\xff\xfe", b"x" * (2 * 1024 * 1024 + 1)], ids=["absent", "binary", "large"]
)
def test_unusable_file_is_not_sent(loramux: Run, adapter_id: str, tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "sk-lmx-secret.jsonl"
    if content is not None:
        path.write_bytes(content)
    for command in (("eval", "acme/support@1"), ("adapters", "promote", "acme/support@1", "--require-eval")):
        done = loramux(*command, path)
        assert done.exit_code == 2, done.output
        assert "sk-lmx-secret" not in done.output


def test_unreadable_file_is_refused_with_the_reason(
    loramux: Run, adapter_id: str, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(Path, "open", refuse)
    done = loramux("eval", "acme/support@1", file)
    assert (done.exit_code, done.stderr) == (2, "loramux: the eval file cannot be read: Permission denied\n")


def test_pipe_and_gigabyte_are_refused_at_once(loramux: Run, adapter_id: str, tmp_path: Path) -> None:
    pipe, sparse = tmp_path / "pipe", tmp_path / "sparse"
    os.mkfifo(pipe)
    with sparse.open("wb") as file:
        file.truncate(2**30)
    said: list[Any] = [json.loads(loramux("eval", "acme/support@1", one, "--json").stdout) for one in (pipe, sparse)]
    assert [one["error"]["code"] for one in said] == ["file_not_found", "file_too_large"]


def test_promotion_shares_the_bases_cache(loramux: Run, adapter_id: str) -> None:
    promote = ("adapters", "promote", "acme/support@1", "--no-warm", "--json")
    assert printed_json(loramux(*promote, "--share-base-cache", 256))["share_base_cache"] == 256
    assert printed_json(loramux(*promote))["share_base_cache"] == 256
    assert "sharing all but the last 256 tokens" in loramux("aliases", "list", "acme/support").stdout
    assert "sharing all but the last 256 tokens" in loramux("aliases", "history", "acme/support").stdout
    assert printed_json(loramux(*promote, "--no-share-base-cache"))["share_base_cache"] is None
    assert loramux(*promote, "--share-base-cache", 256, "--no-share-base-cache").exit_code == 2
    assert loramux(*promote, "--share-base-cache", 0).exit_code == 2


def test_promotion_names_an_overflow(loramux: Run, admin_side: AdminSide, adapter_id: str) -> None:
    served = admin_side.services.engine.self_check.served_name
    promote = ("adapters", "promote", "acme/support@1", "--no-warm", "--json")
    assert printed_json(loramux(*promote, "--overflow", served))["overflow"] == served
    assert printed_json(loramux(*promote))["overflow"] == served
    assert served in loramux("aliases", "list", "acme/support").stdout
    assert printed_json(loramux(*promote, "--no-overflow"))["overflow"] is None
    assert loramux(*promote, "--overflow", served, "--no-overflow").exit_code == 2
    assert loramux(*promote, "--overflow", "acme/none").exit_code == 1


def test_divergence_of_a_shared_cache_is_shown(
    loramux: Run, admin_side: AdminSide, adapter_id: str, file: Path
) -> None:
    queued = printed_json(loramux("eval", "acme/support@1", file, "--share-base-cache", 256, "--no-wait", "--json"))
    assert (queued["share_base_cache"], queued["compare"], queued["divergence"]) == (256, None, None)
    loramux("evals", "cancel", queued["id"])
    database = admin_side.services.database
    eval_id = add_finished_eval(database, adapter_id, 2, passed=4, others=1, share_base_cache=256)
    shown = loramux("evals", "show", eval_id).stdout
    assert "divergence: 0.2500 nats per token, measured on 4 of 4 lines" in shown
    assert "acme/support@2, sharing all but the last 256 tokens  0.250  1/4" in shown
    assert "2, shared" in shown
    listed = loramux("evals", "list", "acme/support@2").stdout.split()
    assert "0.2500" in listed
    promote = ("adapters", "promote", "acme/support@2", "--no-warm", "--share-base-cache")
    assert "divergence in tests.jsonl: 0.2500 nats per token" in loramux(*promote, 256).stdout
    assert (
        "not known: measure it with loramux eval acme/support@2 FILE.jsonl --share-base" in loramux(*promote, 64).stdout
    )
    assert loramux("eval", "acme/support@1", file, "--share-base-cache", 256, "--compare", 2).exit_code == 1


def test_a_promotion_succeeds_if_its_evals_cannot_be_listed(
    loramux: Run, adapter_id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(self: AdminClient, path: str, **parameters: object) -> None:
        raise AdminError(503, "the database does not answer", None, None)

    monkeypatch.setattr(AdminClient, "whole_list", refuse)
    moved = loramux("adapters", "promote", "acme/support@2", "--no-warm", "--share-base-cache", 256)
    assert moved.exit_code == 0
    assert "acme/support: default is now 2 (" in moved.stdout
    assert "the evals cannot be listed: the database does not answer" in moved.stderr


def test_list_tells_that_a_failed_canary_keeps_its_version() -> None:
    canary = {"versions": [2], "verdict": "version 2: slow; not rolled back"}
    alias = {"targets": [{"version": 2, "weight": 100}], "canary": canary}
    assert _canary(alias) == "failed: version 2: slow; not rolled back"
