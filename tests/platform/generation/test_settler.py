from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any, cast

import pytest
from sqlalchemy.exc import DataError, IntegrityError, OperationalError, ProgrammingError

from loramux.platform.admission.database_health import DatabaseHealth
from loramux.platform.admission.group_commit import GroupCommit
from loramux.platform.admission.records import Closing
from loramux.platform.generation.settlement_spool import REFUSED, SettlementSpool, record_of
from loramux.platform.generation.settler import MAX_TRIES, NEVER_RAN, Settler
from loramux.platform.ledger.settlement import Settlement
from loramux.platform.telemetry.metrics import GatewayMetrics

pytestmark = pytest.mark.anyio

CAUSE = Exception("the server's message")


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


class ScriptedCommit:
    """Settles every request but those with an error in `errors`."""

    def __init__(self) -> None:
        self.errors: dict[str, Exception] = {}
        self.settled: list[str] = []

    def submit(self, closing: Closing) -> asyncio.Future[Any]:
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        if closing.request_id in self.errors:
            answer.set_exception(self.errors[closing.request_id])
        else:
            self.settled.append(closing.request_id)
            answer.set_result(True)
        return answer


@pytest.mark.parametrize(
    ("error", "is_refused"),
    [
        (LookupError("there is no such reservation"), True),
        (IntegrityError("INSERT", {}, CAUSE), True),
        (DataError("INSERT", {}, CAUSE), True),
        (KeyError("Mars/Olympus"), False),
        (RuntimeError("quota policies change faster than they can be applied"), False),
        (ProgrammingError("INSERT", {}, CAUSE), False),
        (OperationalError("INSERT", {}, CAUSE), False),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else "",
)
async def test_only_a_refused_settlement_is_set_aside(tmp_path: Path, error: Exception, is_refused: bool) -> None:
    commit, spool = ScriptedCommit(), SettlementSpool(tmp_path, 1 << 20)
    settler = Settler(cast(GroupCommit, commit), GatewayMetrics().generation, DatabaseHealth(), spool)
    for request_id in ("req_1", "req_2"):
        settlement = Settlement(status="completed", prompt_tokens=1, completion_tokens=2)
        spool.append(Closing(request_id=request_id, settlement=settlement))
    commit.errors["req_2"] = error
    await settler.replay()
    assert commit.settled == ["req_1"]
    assert ((tmp_path / REFUSED).exists(), settler.has_waiting) == (is_refused, not is_refused)
    commit.errors.clear()
    await settler.replay()
    assert ("req_2" in commit.settled, settler.has_waiting) == (not is_refused, False)
    settler.close()


def closing_of(request_id: str) -> Closing:
    return Closing(
        request_id=request_id, settlement=Settlement(status="completed", prompt_tokens=1, completion_tokens=2)
    )


async def test_failing_settlement_holds_up_no_other_and_no_recovery(tmp_path: Path) -> None:
    commit, spool = ScriptedCommit(), SettlementSpool(tmp_path, 1 << 20)
    settler = Settler(cast(GroupCommit, commit), GatewayMetrics().generation, DatabaseHealth(), spool)
    commit.errors["req_bad"] = KeyError("a mistake of ours")
    for request_id in ("req_1", "req_bad", "req_2"):
        spool.append(closing_of(request_id))
    assert settler.is_behind
    await settler.replay()
    assert not settler.is_behind
    assert spool.begin_replay().closings == (closing_of("req_bad"),), "the others are not replayed again"
    spool.append(closing_of("req_3"))
    assert settler.is_behind
    for _ in range(MAX_TRIES - 2):
        await settler.replay()
        assert settler.has_waiting
        assert not settler.is_behind
    await settler.replay()
    assert commit.settled == ["req_1", "req_2", "req_3"]
    assert not settler.has_waiting
    assert (tmp_path / REFUSED).read_bytes() == record_of(closing_of("req_bad"))
    settler.close()


async def test_failing_settlement_in_memory_goes_to_the_spool(tmp_path: Path) -> None:
    commit, spool = ScriptedCommit(), SettlementSpool(tmp_path, 1 << 20)
    settler = Settler(cast(GroupCommit, commit), GatewayMetrics().generation, DatabaseHealth(), spool)
    commit.errors["req_bad"] = KeyError("a mistake of ours")
    for request_id in ("req_1", "req_bad"):
        settler._hold(closing_of(request_id))
    await settler.replay()
    assert (settler.num_held, settler.trouble, settler.has_waiting) == (0, None, True)
    settler.close()


@pytest.mark.parametrize("is_cured", [True, False])
async def test_failing_settlement_waits_in_memory_beside_a_full_spool(tmp_path: Path, is_cured: bool) -> None:
    commit, spool = ScriptedCommit(), SettlementSpool(tmp_path, 0)
    settler = Settler(cast(GroupCommit, commit), GatewayMetrics().generation, DatabaseHealth(), spool)
    commit.errors["req_bad"] = KeyError("a mistake of ours")
    for request_id in ("req_1", "req_bad"):
        settler._hold(closing_of(request_id))
    for _ in range(MAX_TRIES - 1):
        await settler.replay()
        assert settler.num_held == 1
    if is_cured:
        commit.errors.clear()
    await settler.replay()
    assert (settler.num_held, settler.has_waiting) == (0, False)
    assert commit.settled == ["req_1", *(["req_bad"] if is_cured else [])]
    assert (tmp_path / REFUSED).exists() is not is_cured
    if not is_cured:
        assert (tmp_path / REFUSED).read_bytes() == record_of(closing_of("req_bad"))
    settler.close()


async def test_release_that_fails_for_an_unknown_reason_is_tried_again(tmp_path: Path) -> None:
    commit, spool = ScriptedCommit(), SettlementSpool(tmp_path, 1 << 20)
    settler = Settler(cast(GroupCommit, commit), GatewayMetrics().generation, DatabaseHealth(), spool)
    commit.errors["req_1"] = KeyError("a mistake of ours")
    commit.errors["req_2"] = LookupError("there is no such reservation")
    for request_id in ("req_1", "req_2"):
        spool.append(Closing(request_id=request_id, settlement=NEVER_RAN))
    await settler.replay()
    assert [one.request_id for one in spool.begin_replay().closings] == ["req_1"]
    assert not (tmp_path / REFUSED).exists()
    commit.errors.clear()
    await settler.replay()
    assert (commit.settled, settler.has_waiting) == (["req_1"], False)
    settler.close()
