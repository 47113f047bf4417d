from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from loramux.platform.batches import answer_writer
from loramux.platform.batches.answer_writer import AnswerWriter
from loramux.platform.batches.batch_claims import StoredAnswer, WaitingLine

pytestmark = pytest.mark.anyio


class Records:
    def __init__(self) -> None:
        self.groups: list[list[int]] = []
        self.error: Exception | None = None

    async def record(self, answers: Sequence[tuple[WaitingLine, StoredAnswer]]) -> None:
        if self.error is not None:
            raise self.error
        self.groups.append([line.line for line, _ in answers])


@pytest.fixture
def records() -> Records:
    return Records()


@pytest.fixture
def writer(records: Records, monkeypatch: pytest.MonkeyPatch) -> AnswerWriter:
    monkeypatch.setattr(answer_writer, "GATHER_S", 0.01)
    return AnswerWriter(records.record)


async def store(writer: AnswerWriter, number: int, num_bytes: int = 1) -> None:
    line = WaitingLine(number, 0, 1, "base", f"req_{number}")
    await writer.store(line, StoredAnswer(200, b"x" * num_bytes, None))


async def test_answers_that_come_together_are_stored_together(
    writer: AnswerWriter, records: Records, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(answer_writer, "MAX_ANSWERS", 4)
    await asyncio.gather(*(store(writer, number) for number in range(6)))
    assert records.groups == [[0, 1, 2, 3], [4, 5]]
    await store(writer, 6)
    assert records.groups[2:] == [[6]]


async def test_long_answers_are_stored_in_smaller_groups(
    writer: AnswerWriter, records: Records, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(answer_writer, "MAX_BYTES", 10)
    await asyncio.gather(*(store(writer, number, num_bytes) for number, num_bytes in enumerate((99, 4, 4, 4, 4))))
    assert records.groups == [[0], [1, 2, 3], [4]]


async def test_every_line_of_a_group_learns_why_it_was_not_stored(writer: AnswerWriter, records: Records) -> None:
    records.error = ValueError("no")
    found = await asyncio.gather(*(store(writer, number) for number in range(3)), return_exceptions=True)
    assert found == [records.error] * 3
    records.error = None
    await store(writer, 3)
    assert records.groups == [[3]]


async def test_line_that_no_longer_waits_does_not_disturb_others(writer: AnswerWriter, records: Records) -> None:
    gone = asyncio.create_task(store(writer, 0))
    other = asyncio.create_task(store(writer, 1))
    await asyncio.sleep(0)
    gone.cancel()
    await other
    assert records.groups == [[0, 1]]
