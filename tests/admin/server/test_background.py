from __future__ import annotations

import asyncio

import pytest
from sqlalchemy.exc import OperationalError
from structlog.testing import capture_logs

from loramux.admin.server import background
from loramux.admin.server.background import in_background, repeat

pytestmark = pytest.mark.anyio


async def test_an_error_ends_only_one_call_of_repeated_work() -> None:
    trouble = OperationalError("SELECT", {}, Exception("gone"))
    errors: list[Exception] = [KeyError("zone"), KeyError("zone"), trouble, KeyError("zone")]
    has_gone_on = asyncio.Event()

    async def work() -> None:
        if errors:
            raise errors.pop(0)
        has_gone_on.set()

    with capture_logs() as logs:
        async with in_background(repeat(work, 0.0, "nothing is swept"), "sweeps"), asyncio.timeout(10):
            await has_gone_on.wait()
    assert {log["event"] for log in logs} == {"nothing is swept; trying again"}
    # Only the first of equal errors in a row has a traceback.
    assert [(log["log_level"], "exc_info" in log) for log in logs] == [
        ("error", True),
        ("error", False),
        ("warning", False),
        ("error", True),
    ]


async def test_failed_work_is_tried_again_before_its_interval_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    has_gone_on = asyncio.Event()
    num_calls = 0

    async def work() -> None:
        nonlocal num_calls
        num_calls += 1
        if num_calls == 1:
            raise KeyError("zone")
        has_gone_on.set()

    monkeypatch.setattr(background, "RETRY_S", 0.0)
    async with in_background(repeat(work, 3600.0, "nothing is swept"), "sweeps"), asyncio.timeout(10):
        await has_gone_on.wait()


async def test_error_that_ends_work_is_logged_at_once() -> None:
    async def work() -> None:
        raise ValueError("broken")

    with capture_logs() as logs:
        async with in_background(work(), "upkeep"):
            await asyncio.wait([one for one in asyncio.all_tasks() if one.get_name() == "upkeep"])
            # The callback of the task runs in the next turn of the loop.
            await asyncio.sleep(0)
            assert [(log["work"], str(log["exc_info"])) for log in logs] == [("upkeep", "broken")]
    assert len(logs) == 1


async def test_cancelled_work_is_not_an_error() -> None:
    with capture_logs() as logs:
        async with in_background(asyncio.sleep(3600), "upkeep"):
            pass
    assert logs == []
