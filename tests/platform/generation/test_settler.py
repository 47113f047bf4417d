from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any, cast

import pytest
from sqlalchemy.exc import DataError, IntegrityError, OperationalError, ProgrammingError

from loramux.platform.admission.database_health import DatabaseHealth
from loramux.platform.admission.group_commit import GroupCommit
from loramux.platform.admission.records import Closing
from loramux.platform.generation.settlement_spool import REFUSED, SettlementSpool
from loramux.platform.generation.settler import Settler
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
