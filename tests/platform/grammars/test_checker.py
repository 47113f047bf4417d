from __future__ import annotations

import asyncio
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import structlog

from loramux.adapter_store.sandbox.confined_pool import Ended
from loramux.adapter_store.sandbox.confinement import CALLS, FILES
from loramux.adapter_store.validation.validator import missing_measures
from loramux.platform.errors import InvalidRequest, RateLimited, Unavailable
from loramux.platform.grammars import checker as checker_module
from loramux.platform.grammars.checker import (
    MAX_KEPT_PER_TENANT,
    MAX_WAITING_PER_TENANT,
    NUM_PROCESSES,
    Checked,
    GrammarChecker,
)
from loramux.platform.grammars.constraint import MAX_TEXT_BYTES, Constraint
from tests.adapter_store.sandbox import lesser_kernel
from tests.demo_base import DEMO_BASE

pytestmark = pytest.mark.anyio


class Observed(list[tuple[str, tuple[str, ...]]]):
    def note(self, outcome: str, seconds: float, keywords: tuple[str, ...]) -> None:
        assert seconds >= 0
        self.append((outcome, keywords))


@pytest.fixture(scope="module")
def observed() -> Observed:
    return Observed()


@pytest.fixture(scope="module")
def shared_checker(observed: Observed) -> Iterator[GrammarChecker]:
    with pytest.MonkeyPatch.context() as patch:
        # Most of these checks are long. Pauses after them are tested with the lanes.
        patch.setattr(checker_module, "PAUSE", 0.0)
        # On a busy machine, the processor time must end a check, too.
        for name in ("QUICK", "FULL"):
            patch.setattr(checker_module, name, replace(getattr(checker_module, name), wall_s=600.0, niceness=0))
        checker = GrammarChecker(DEMO_BASE, 1024, (1,), observed.note)
    yield checker
    checker.close()


@pytest.fixture
def checker(shared_checker: GrammarChecker, observed: Observed) -> GrammarChecker:
    shared_checker._kept.clear()
    observed.clear()
    return shared_checker


def checks_held(checker: GrammarChecker, monkeypatch: pytest.MonkeyPatch, *tenants: str) -> threading.Event:
    """Until the returned event is set, no check of these tenants ends, and no outcome is kept."""
    may_end, keep = threading.Event(), checker._keep

    def keep_late(key: tuple[str, str, str], ended: Ended) -> Checked:
        assert key[0] not in tenants or may_end.wait(60)
        return keep(key, ended)

    monkeypatch.setattr(checker, "_keep", keep_late)
    return may_end


def schema(document: Any) -> Constraint:
    return Constraint.of_json("json_schema", document, "response_format")


CHAIN = {
    "$defs": {f"d{i}": {"anyOf": [{"$ref": f"#/$defs/d{i + 1}"}, {"type": "null"}]} for i in range(2000)}
    | {"d2000": {"type": "null"}},
    "$ref": "#/$defs/d0",
}
"""A chain of references that overflows the compiler's stack."""

ALTERNATIVES = {
    "allOf": [{"anyOf": [{"type": "string", "pattern": f"a{i}"}, {"type": "integer", "minimum": i}]} for i in range(22)]
}
"""A schema with 2**22 combinations of alternatives."""


@pytest.mark.parametrize(
    "constraint",
    [
        pytest.param(schema({"type": "object"}), id="any object"),
        pytest.param(schema({"type": "string", "maxLength": 5}), id="schema"),
        pytest.param(schema(True), id="true"),
        *(
            pytest.param(schema({"properties": {"a": {keyword: [{"$id": "x"}]}}}), id=f"$id in {keyword}")
            for keyword in ("const", "enum", "default", "example", "examples")
        ),
        pytest.param(Constraint.of_text("regex", "[a-c]{3,9}", "p"), id="regex"),
        pytest.param(Constraint.of_json("choice", ["yes", 'a "quoted" one', "new\nline"], "p"), id="choice"),
        pytest.param(Constraint.of_text("grammar", 'start: "a" | "b" start', "p"), id="Lark grammar"),
        pytest.param(Constraint.of_text("grammar", 'root ::= "a" | "b" root', "p"), id="GBNF grammar"),
    ],
)
async def test_a_good_constraint_becomes_a_grammar(
    checker: GrammarChecker, observed: Observed, constraint: Constraint
) -> None:
    first = await checker.grammar("acme", constraint)
    assert first
    assert await checker.grammar("acme", constraint) == first
    assert observed == [("accepted", ()), ("known", ())]


@pytest.mark.parametrize(
    ("constraint", "said"),
    [
        pytest.param(schema({"type": "array", "contains": {}}), 'Unimplemented keys: ["contains"]', id="keyword"),
        pytest.param(schema({"type": "nothing"}), "nothing", id="type"),
        pytest.param(schema(False), "", id="false"),
        pytest.param(schema({"items": {"$id": "https://a/b", "$ref": "c"}}), "$id is supported only", id="nested $id"),
        pytest.param(schema({"properties": {"default": {"$id": "a"}}}), "$id is supported", id="$id of a property"),
        pytest.param(schema({"$ref": "https://example.com/schema"}), "", id="remote reference"),
        pytest.param(schema({"type": "string", "pattern": "(((("}), "unclosed", id="pattern"),
        pytest.param(schema({"type": "integer", "minimum": 5, "maximum": 4}), "", id="contradiction"),
        pytest.param(Constraint.of_text("regex", "((((", "p"), "unclosed group", id="regex"),
        pytest.param(Constraint.of_text("grammar", "start: undefined", "p"), "undefined", id="undefined rule"),
        pytest.param(Constraint.of_text("grammar", "", "p"), "", id="empty grammar"),
        pytest.param(Constraint.of_text("grammar", 'start: ("a" | "b") start', "p"), "no answer can end", id="endless"),
        pytest.param(Constraint.of_text("grammar", 'root ::= "a" root', "p"), "no answer can end", id="endless GBNF"),
        pytest.param(schema({"type": "array", "items": {"$ref": "#"}, "minItems": 1}), "no answer can end", id="deep"),
        pytest.param(Constraint.of_text("grammar", "start: " + '"a"?' * 4000, "p"), "", id="ambiguous"),
        pytest.param(schema(CHAIN), "too complex", id="overflows the stack"),
        pytest.param(schema(ALTERNATIVES), "too complex", id="too many alternatives"),
    ],
)
async def test_a_bad_constraint_is_refused_in_bounded_time(
    checker: GrammarChecker, observed: Observed, constraint: Constraint, said: str
) -> None:
    started_s = time.monotonic()
    with pytest.raises(InvalidRequest) as refusal:
        await checker.grammar("acme", constraint)
    assert time.monotonic() - started_s < 30
    assert said in refusal.value.message
    assert (refusal.value.param, refusal.value.code) == (constraint.param, "grammar_refused")
    assert [outcome for outcome, _ in observed] == ["refused"]
    assert await checker.grammar("acme", Constraint.of_text("regex", "a|b", "p"))


async def test_unsupported_keywords_are_reported(checker: GrammarChecker, observed: Observed) -> None:
    with pytest.raises(InvalidRequest):
        await checker.grammar("acme", schema({"type": "array", "contains": {}, "uniqueItems": True}))
    assert observed == [("refused", ("contains", "uniqueItems"))]


async def test_tenants_share_no_outcomes(checker: GrammarChecker, observed: Observed) -> None:
    constraint = Constraint.of_text("regex", "a|b", "p")
    for tenant in ("acme", "other"):
        await checker.grammar(tenant, constraint)
    assert [outcome for outcome, _ in observed] == ["accepted", "accepted"]


async def test_equal_requests_of_a_tenant_are_checked_once(
    checker: GrammarChecker, observed: Observed, monkeypatch: pytest.MonkeyPatch
) -> None:
    constraint = Constraint.of_text("regex", "once|twice", "p")
    # Otherwise, the last requests could find a quick check's outcome.
    all_asked = checks_held(checker, monkeypatch, "acme", "other")
    # More than a tenant may have waiting, and another tenant's.
    asked = [asyncio.create_task(checker.grammar("acme", constraint)) for _ in range(MAX_WAITING_PER_TENANT + 5)]
    other = asyncio.create_task(checker.grammar("other", constraint))
    await asyncio.sleep(0)
    assert len(checker._checks) == 2
    all_asked.set()
    asked.pop().cancel()
    grammars = await asyncio.gather(*asked)
    assert set(grammars) == {await other}
    assert observed == [("accepted", ())] * (MAX_WAITING_PER_TENANT + 5)
    assert not checker._checks


async def test_one_tenants_grammars_leave_a_process_to_others(checker: GrammarChecker) -> None:
    slow = [
        asyncio.create_task(checker.grammar("slow", schema({**ALTERNATIVES, "title": str(index)})))
        for index in range(MAX_WAITING_PER_TENANT)
    ]
    await asyncio.sleep(0)
    assert await checker.grammar("quick", Constraint.of_text("regex", "a|b", "p"))
    assert any(not one.done() for one in slow), "each takes a second of processor time"
    for one in slow:
        one.cancel()
    await asyncio.gather(*slow, return_exceptions=True)
    assert not checker._checks
    # The running check ends. The waiting ones do not start.
    assert await checker.grammar("slow", Constraint.of_text("regex", "a|c", "p"))
    assert sum(tenant_id == "slow" for tenant_id, _, _ in checker._kept) < MAX_WAITING_PER_TENANT


async def test_more_slow_tenants_than_processes_leave_a_process_to_others(checker: GrammarChecker) -> None:
    slow = [
        asyncio.create_task(checker.grammar(f"slow{tenant}", schema({**ALTERNATIVES, "title": str(index)})))
        for tenant in range(2 * NUM_PROCESSES)
        for index in range(4)
    ]
    await asyncio.sleep(0)
    for index in range(5):
        assert await checker.grammar("quick", Constraint.of_text("regex", f"a{index}", "p"))
    assert any(not one.done() for one in slow), "each takes a second of processor time"
    for one in slow:
        one.cancel()
    await asyncio.gather(*slow, return_exceptions=True)


async def test_the_outcome_of_a_running_check_is_kept_if_the_client_disconnects(checker: GrammarChecker) -> None:
    constraint = schema({**ALTERNATIVES, "title": "kept"})
    asked = asyncio.create_task(checker.grammar("hasty", constraint))
    await asyncio.sleep(0)
    queue = checker._pool._lanes._queues["hasty"]
    while not (asked.done() or (queue.needs_full_turn and queue.is_running)):  # noqa: ASYNC110 - the pool has threads
        await asyncio.sleep(0.005)
    asked.cancel()
    await asyncio.gather(asked, return_exceptions=True)
    # The tenant's next check begins when the running check has ended.
    assert await checker.grammar("hasty", Constraint.of_text("regex", "a|b", "p"))
    assert ("hasty", constraint.kind, constraint.text) in checker._kept


async def test_a_tenant_may_have_a_few_waiting_grammars(
    checker: GrammarChecker, monkeypatch: pytest.MonkeyPatch
) -> None:
    all_asked = checks_held(checker, monkeypatch, "acme")
    asked = [
        asyncio.create_task(checker.grammar("acme", Constraint.of_text("regex", f"a{index}", "p")))
        for index in range(MAX_WAITING_PER_TENANT)
    ]
    await asyncio.sleep(0)
    with pytest.raises(RateLimited) as refusal:
        await checker.grammar("acme", Constraint.of_text("regex", "one more", "p"))
    assert (refusal.value.code, refusal.value.retry_after_s is not None) == ("too_many_grammars", True)
    assert await checker.grammar("other", Constraint.of_text("regex", "a", "p"))
    all_asked.set()
    assert all(await asyncio.gather(*asked))


async def test_a_tenant_keeps_a_bounded_number_of_outcomes(checker: GrammarChecker) -> None:
    for index in range(MAX_KEPT_PER_TENANT + 3):
        await checker.grammar("acme", Constraint.of_text("regex", f"b{index}", "p"))
    assert len(checker._kept) == MAX_KEPT_PER_TENANT
    assert ("acme", "regex", "b0") not in checker._kept


STARVED = """
import time
from loramux.adapter_store.sandbox.fork_server import fork_for_each_request
fork_for_each_request(idle_s=None)
time.sleep(60)
"""
"""A worker whose forks get no processor time, as on a machine that is too busy."""


async def test_a_busy_machine_makes_no_grammar_too_complex(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("QUICK", "FULL"):
        monkeypatch.setattr(checker_module, name, replace(getattr(checker_module, name), wall_s=0.05))
    checker = GrammarChecker(DEMO_BASE, 1024, (1,), command=(sys.executable, "-S", "-c", STARVED))
    try:
        with pytest.raises(Unavailable) as failure:
            await checker.grammar("acme", Constraint.of_text("regex", "a", "p"))
        assert (failure.value.code, failure.value.retry_after_s) == ("grammars_unavailable", checker_module.RETRY_S)
        assert not checker._kept, "the next request is checked again"
    finally:
        checker.close()


async def test_without_a_process_the_request_is_told_to_try_again() -> None:
    checker = GrammarChecker(DEMO_BASE, 1024, (1,), command=("/does/not/exist",))
    with pytest.raises(Unavailable) as failure:
        await checker.grammar("acme", Constraint.of_text("regex", "a", "p"))
    assert failure.value.code == "grammars_unavailable"
    checker.close()


def test_a_constraint_has_a_bounded_length() -> None:
    with pytest.raises(InvalidRequest) as refusal:
        Constraint.of_text("regex", "a" * (MAX_TEXT_BYTES + 1), "guided_regex")
    assert (refusal.value.code, refusal.value.param) == ("grammar_too_large", "guided_regex")


async def test_grammars_are_not_checked_without_a_required_sandbox() -> None:
    if CALLS in missing_measures():
        pytest.skip("this machine cannot imitate a lesser one")
    command = (sys.executable, lesser_kernel.__file__, FILES, *checker_module._WORKER[2:])
    checker = GrammarChecker(DEMO_BASE, 1024, (1,), command=command, is_sandbox_required=True)
    try:
        with structlog.testing.capture_logs() as entries, pytest.raises(InvalidRequest):
            await checker.grammar("acme", Constraint.of_text("regex", "a", "p"))
        assert "this machine has no landlock" in str(entries)
    finally:
        checker.close()
