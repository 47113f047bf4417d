"""A chat without a token limit reserves one chunk at a time and is charged for the tokens that it received."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest
from sqlalchemy import select

from loramux.migrations import schema
from loramux.platform.admission.admission import Admission
from loramux.platform.admission.records import Operation, Outcome
from loramux.platform.generation import generation, plan
from loramux.platform.generation.maintenance import Maintenance
from loramux.platform.quotas.counters import UNITS
from loramux.platform.requests import planning
from tests.platform.scripted_engine import Script

pytestmark = pytest.mark.anyio

ASKED = [{"role": "user", "content": "Hello"}]
CHUNK = 32
PAUSE_S = 60.0
"""A sequence that pauses for an extension must outlast a busy machine's commit."""


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planning, "CHUNK_TOKENS", CHUNK)
    monkeypatch.setattr(generation, "CHUNK_TOKENS", CHUNK)
    monkeypatch.setattr(generation, "EXTEND_AHEAD_TOKENS", 8)
    monkeypatch.setattr(plan, "PAUSE_S", PAUSE_S)


def says(num_tokens: int, **script: Any) -> Any:
    return lambda add: Script(token_ids=(5,) * num_tokens, **script)


def counter(gateway: Any) -> tuple[int, int]:
    with gateway.database.read() as connection:
        row = connection.execute(select(schema.quota_counters)).one()
    return row.level // UNITS, row.reserved


async def test_a_long_answer_is_granted_in_chunks(gateway: Any) -> None:
    gateway.limit("tokens_per_minute", 10_000)
    gateway.engine.script = says(100)
    answer = await gateway.openai.chat.completions.create(model="base", messages=ASKED)
    [add] = gateway.engine.adds
    assert (add.max_tokens, add.pause_s) == (CHUNK, PAUSE_S)
    assert [extension.max_tokens for extension in gateway.engine.extensions] == [64, 96, 128]
    # The end-of-sequence token counts too.
    assert (answer.usage.completion_tokens, answer.choices[0].finish_reason) == (101, "stop")
    assert counter(gateway) == (10_000 - len(add.prompt) - 101, 0)


async def test_refused_chunk_ends_the_answer_with_length(gateway: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    extend = gateway.services.run.requests._extend

    async def extend_or_end_the_pause(request_id: str, tokens: int) -> bool:
        is_granted: bool = await extend(request_id, tokens)
        if not is_granted:
            gateway.engine.end_pauses()
        return is_granted

    monkeypatch.setattr(gateway.services.run.requests, "_extend", extend_or_end_the_pause)
    gateway.engine.script = says(100)
    await gateway.openai.chat.completions.create(model="base", messages=ASKED, max_tokens=1)
    num_prompt = len(gateway.engine.adds[0].prompt)
    gateway.limit("tokens_per_minute", num_prompt + 2 * CHUNK + 5)
    stream = await gateway.openai.chat.completions.create(
        model="base", messages=ASKED, stream=True, stream_options={"include_usage": True}
    )
    chunks = [chunk async for chunk in stream]
    assert chunks[-1].usage.completion_tokens == 2 * CHUNK
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-1] == "length"
    assert [extension.max_tokens for extension in gateway.engine.extensions] == [2 * CHUNK]
    assert gateway.usage()[-1].completion_tokens == 2 * CHUNK
    level, reserved = counter(gateway)
    assert reserved == 0
    # In the few milliseconds of the test, this bucket refills by less than one token.
    assert level == 5


async def test_quota_below_the_context_admits_a_chat_without_max_tokens(gateway: Any) -> None:
    gateway.engine.script = says(3)
    gateway.limit("tokens_per_minute", 100)
    assert gateway.services.max_model_len > 100
    answer = await gateway.openai.chat.completions.create(model="base", messages=ASKED)
    assert answer.choices[0].finish_reason == "stop"


async def test_choices_are_extended_together(gateway: Any) -> None:
    gateway.limit("tokens_per_minute", 10_000)
    gateway.engine.script = says(40)
    answer = await gateway.openai.chat.completions.create(model="base", messages=ASKED, n=3)
    assert answer.usage.completion_tokens == 3 * 41
    assert len({extension.sequence_id for extension in gateway.engine.extensions}) == 3
    assert {extension.max_tokens for extension in gateway.engine.extensions} == {64}
    assert counter(gateway)[1] == 0


async def test_explicit_max_tokens_are_granted_at_once(gateway: Any) -> None:
    gateway.engine.script = says(100)
    answer = await gateway.openai.chat.completions.create(model="base", messages=ASKED, max_completion_tokens=90)
    assert (gateway.engine.adds[0].max_tokens, gateway.engine.adds[0].pause_s) == (90, 0.0)
    assert gateway.engine.extensions == []
    assert answer.usage.completion_tokens == 90


async def test_unlimited_answer_ends_with_the_context(gateway: Any) -> None:
    gateway.engine.script = says(1000)
    answer = await gateway.openai.chat.completions.create(model="base", messages=ASKED)
    most = gateway.services.max_model_len - len(gateway.engine.adds[0].prompt)
    assert (answer.usage.completion_tokens, answer.choices[0].finish_reason) == (most, "length")
    assert gateway.engine.extensions[-1].max_tokens == most


async def test_mistake_of_ours_refuses_an_extension(gateway: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: Admission, operations: Sequence[Operation]) -> list[Outcome]:
        raise KeyError("a mistake of ours")

    monkeypatch.setattr(Admission, "commit", fail)
    assert await gateway.services.run.requests._extend("req_1", CHUNK) is False


async def test_mistake_in_one_step_of_the_upkeep_ends_no_other(gateway: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    loop, has_swept = asyncio.get_running_loop(), asyncio.Event()

    def fail(self: Admission) -> int:
        raise KeyError("a mistake of ours")

    def sweep(self: Admission) -> int:
        loop.call_soon_threadsafe(has_swept.set)
        return 0

    monkeypatch.setattr(Maintenance, "_may_recover", lambda self: True)
    monkeypatch.setattr(Admission, "recover_expired", fail)
    monkeypatch.setattr(Admission, "roll_up", fail)
    monkeypatch.setattr(Admission, "sweep_counters", sweep)
    keeping = asyncio.create_task(gateway.services.run.maintenance._keep_leases())
    async with asyncio.timeout(30):
        await has_swept.wait()
    keeping.cancel()
