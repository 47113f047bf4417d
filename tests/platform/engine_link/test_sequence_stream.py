from __future__ import annotations

import asyncio

import pytest

from loramux.engine.protocol.messages import Add, Finished, PromptLogprob, SamplingParams, SequenceOutput, TokenLogprobs
from loramux.platform.engine_link.sequence_stream import SequenceStream

pytestmark = pytest.mark.anyio

FINISHED = Finished(sequence_id="s", reason="length", prompt_tokens=2, completion_tokens=9)


def new_stream() -> SequenceStream:
    return SequenceStream(Add(sequence_id="s", prompt=(5, 6), max_tokens=9, sampling=SamplingParams()))


def output(*token_ids: int) -> SequenceOutput:
    logprobs = tuple(TokenLogprobs(token_id=token_id, logprob=-float(token_id)) for token_id in token_ids)
    return SequenceOutput(sequence_id="s", token_ids=token_ids, logprobs=logprobs)


async def taken(stream: SequenceStream) -> list[SequenceOutput | Finished]:
    return [item async for item in stream]


async def test_reader_that_keeps_up_gets_each_output_at_once() -> None:
    stream = new_stream()
    received: list[SequenceOutput | Finished] = []

    async def read() -> None:
        async for item in stream:
            received.append(item)

    reading = asyncio.create_task(read())
    put = [output(7), output(8, 9), FINISHED]
    for number, item in enumerate(put):
        stream.put(item)
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert received == put[: number + 1]
    await reading


async def test_outputs_that_wait_are_joined_without_loss_and_before_the_end() -> None:
    stream = new_stream()
    scored = (PromptLogprob(token_id=6, logprob=-0.5, rank=1),)
    stream.put(SequenceOutput(sequence_id="s", token_ids=(), prompt_logprobs=scored))
    for item in (output(7), output(8, 9), FINISHED):
        stream.put(item)
    joined, end = await taken(stream)
    assert isinstance(joined, SequenceOutput)
    assert (joined.token_ids, joined.logprobs) == ((7, 8, 9), output(7, 8, 9).logprobs)
    assert joined.prompt_logprobs == scored
    assert end == FINISHED
    assert await taken(stream) == []


async def test_stream_of_a_lost_engine_bills_its_unread_tokens() -> None:
    stream = new_stream()
    stream.put(output(7, 8))
    stream.put(output(9))
    stream.fail(was_running=True)
    *outputs, end = await taken(stream)
    assert [token_id for item in outputs if isinstance(item, SequenceOutput) for token_id in item.token_ids] == [
        7,
        8,
        9,
    ]
    assert isinstance(end, Finished)
    assert (end.reason, end.code, end.completion_tokens) == ("error", "engine_unavailable", 3)
