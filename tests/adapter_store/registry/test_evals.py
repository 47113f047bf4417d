from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
from sqlalchemy import select, update

from loramux.adapter_store.errors import ClaimLost, EvalNotFound, LimitReached
from loramux.adapter_store.registry.aliases import AdapterAliases
from loramux.adapter_store.registry.eval_claims import EvalClaims
from loramux.adapter_store.registry.evals import MAX_OPEN_EVALS, PPM, Eval, EvalAnswer, Evals, NewEval, safe_name
from loramux.adapter_store.registry.records import RequiredEval
from loramux.adapter_store.registry.registry import AdapterRegistry
from loramux.migrations import schema
from loramux.migrations.database import Database
from tests.adapter_store.registry.bare_versions import Versions
from tests.adapter_store.tenant_rows import add_tenant

SHA256 = "0" * 64


AddAdapter = Callable[[str], str]


@pytest.fixture
def add_adapter(database: Database, versions: Versions) -> AddAdapter:
    """Add a tenant's adapter with two ready versions."""

    def add(slug: str) -> str:
        adapter = AdapterRegistry(database).create_adapter(add_tenant(database, slug), "support")
        for mark in "12":
            versions.add(adapter.id, mark)
        return adapter.id

    return add


def queue(database: Database, adapter_id: str, compared: int | None = None) -> Eval:
    new = NewEval(name="tests.jsonl", sha256=SHA256, content=b"{}", num_cases=3, compared=compared)
    return Evals(database).create(adapter_id, 1, new)


def answer(line: int, side: int = 0, score_ppm: int = PPM, text: str = "yes") -> EvalAnswer:
    return EvalAnswer(line, side, score_ppm, score_ppm == PPM, text, "")


def test_oldest_eval_of_another_tenant_is_claimed(database: Database, add_adapter: AddAdapter) -> None:
    acme, globex = add_adapter("acme"), add_adapter("globex")
    first, second, third = queue(database, acme), queue(database, acme), queue(database, globex)
    claims = EvalClaims(database)
    found = [claims.claim(), claims.claim([first.tenant_id]), claims.claim([first.tenant_id]), claims.claim()]
    assert [one and one.eval.id for one in found] == [first.id, third.id, None, second.id]
    assert EvalClaims(database).claim() is None


def test_only_one_server_gets_an_eval(database: Database, add_adapter: AddAdapter) -> None:
    queue(database, add_adapter("acme"))
    found, start = [], threading.Barrier(4)

    def claim() -> None:
        claims = EvalClaims(database)
        start.wait()
        found.append(claims.claim())

    threads = [threading.Thread(target=claim) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sum(one is not None for one in found) == 1


def test_expired_claim_is_taken_over_with_its_answers(database: Database, add_adapter: AddAdapter) -> None:
    eval_id = queue(database, add_adapter("acme"), compared=2).id
    slow, other = EvalClaims(database, lease_us=0), EvalClaims(database)
    assert slow.claim() is not None
    slow.record(eval_id, answer(1))
    slow.record(eval_id, answer(1, side=1, score_ppm=250_001))
    taken = other.claim()
    assert taken is not None
    assert (taken.content, taken.answered) == (b"{}", {(1, 0), (1, 1)})
    for change in (slow.renew, slow.give_back, slow.finish):
        with pytest.raises(ClaimLost):
            change(eval_id)
    with pytest.raises(ClaimLost):
        slow.record(eval_id, answer(2))
    other.record(eval_id, answer(3, score_ppm=500_000, text="a\x00b"))
    other.finish(eval_id)
    found = Evals(database).get(eval_id)
    # A line without an answer counts as 0.
    assert (found.state, found.score_ppm, found.num_passed, found.num_answers) == ("done", 500_000, 1, 3)
    assert (found.compared_ppm, found.compared_passed) == (83_333, 0)
    assert Evals(database).answers(eval_id, 10)[0][-1].answer == "a\ufffdb"


def test_claim_from_before_the_clock_was_set_back_does_not_count(database: Database, add_adapter: AddAdapter) -> None:
    queue(database, add_adapter("acme"))
    claims = EvalClaims(database)
    assert claims.claim() is not None
    assert claims.claim() is None
    with database.write() as connection:
        connection.execute(update(schema.evals).values(claim_expires_us=database.now_us(connection) + 3_600_000_000))
    assert claims.claim() is not None


def test_demand_without_a_judge_can_be_read_by_servers_that_know_no_judges(
    database: Database, add_adapter: AddAdapter
) -> None:
    adapter_id, aliases = add_adapter("acme"), AdapterAliases(database)
    for judge in (None, "the-base"):
        new = NewEval(name="tests.jsonl", sha256=SHA256, content=b"{}", num_cases=1, judge=judge)
        eval_id = Evals(database).create(adapter_id, 1, new).id
        passed = {"state": "done", "score_ppm": PPM}
        with database.write() as connection:
            connection.execute(update(schema.evals).where(schema.evals.c.id == eval_id).values(passed))
        wanted = RequiredEval(SHA256, "tests.jsonl", PPM, judge)
        alias = aliases.set(adapter_id, "judged" if judge else "plain", {1: 1}, required_eval=wanted)
        assert aliases.get(adapter_id, alias.name).required_eval == wanted
    stored = {"sha256": SHA256, "name": "tests.jsonl", "min_ppm": PPM}
    with database.read() as connection:
        demands = {row.name: row.required_eval for row in connection.execute(select(schema.adapter_aliases))}
    assert demands == {"default": None, "plain": stored, "judged": {**stored, "judge": "the-base"}}


def test_cancelled_eval_takes_no_answers(database: Database, add_adapter: AddAdapter) -> None:
    eval_id = queue(database, add_adapter("acme")).id
    claims, evals = EvalClaims(database), Evals(database)
    assert claims.claim() is not None
    assert evals.cancel(eval_id).state == "cancelled"
    with pytest.raises(ClaimLost):
        claims.record(eval_id, answer(1))
    with pytest.raises(ClaimLost):
        claims.fail(eval_id, "code", "message")
    assert evals.answers(eval_id, 10) == ([], False)
    for unknown in ("evl_" + "0" * 32, "x", "\x00"):
        with pytest.raises(EvalNotFound):
            evals.get(unknown)


def test_open_evals_are_limited_by_tenant(database: Database, add_adapter: AddAdapter) -> None:
    acme, globex = add_adapter("acme"), add_adapter("globex")
    for _ in range(MAX_OPEN_EVALS):
        first = queue(database, acme)
    with pytest.raises(LimitReached):
        queue(database, acme)
    queue(database, globex)
    Evals(database).cancel(first.id)
    queue(database, acme)


@pytest.mark.parametrize(
    ("name", "is_kept"),
    [
        ("tickets.jsonl", True),
        ("support questions about billing 2024-10-01.jsonl", True),
        ("internationalisation_of_addresses.jsonl", True),
        ("sk-lmx-abc.jsonl", False),
        ("my ghp_abc.jsonl", False),
        ("4f6b8a0c2e4f6a8b0c1d9e.jsonl", False),
        ("../secret", False),
        ("a\nb", False),
        ("", False),
        ("x" * 101, False),
    ],
)
def test_names_like_secrets_are_replaced(name: str, is_kept: bool) -> None:
    assert safe_name(name, SHA256) == (name if is_kept else "eval-000000000000")
