from __future__ import annotations

import asyncio
import json
import socket
from typing import Any

import pytest

from loramux.engine.protocol.messages import Finished, FromEngine, SequenceOutput, StepOutput, TokenLogprobs
from loramux.engine.server.gateway_link import GatewayLink
from loramux.platform.generation.choice import ChoiceDelta
from loramux.platform.generation.generation import Generation
from loramux.platform.generation.pending_deltas import PendingDeltas
from tests.platform.scripted_engine import Script

pytestmark = pytest.mark.anyio

NUM_CHOICES = 4
NUM_TOKENS = 200
BODY = {
    "model": "base",
    "prompt": [5, 6, 7],
    "n": NUM_CHOICES,
    "max_tokens": NUM_TOKENS,
    "logprobs": 5,
    "stream": True,
    "stream_options": {"include_usage": True},
}


def delta(index: int, text: str, finish_reason: str | None = None) -> ChoiceDelta:
    return ChoiceDelta(index, text, (TokenLogprobs(token_id=ord(text[0]), logprob=-1.0),), finish_reason)


async def taken(pending: PendingDeltas) -> list[ChoiceDelta]:
    found = []
    while (item := await pending.get()) is not None:
        found.append(item)
    return found


async def test_fast_reader_gets_each_delta_separately() -> None:
    pending = PendingDeltas()
    reading = asyncio.create_task(taken(pending))
    put = [delta(number % 3, chr(97 + number % 26)) for number in range(640)]
    for item in put:
        pending.put(item)
        await asyncio.sleep(0)
    pending.close()
    assert await reading == put


async def test_unread_deltas_are_joined_in_order_without_loss() -> None:
    pending = PendingDeltas()
    for number in range(10_000):
        for index in range(3):
            pending.put(delta(index, chr(97 + number % 26)))
    pending.put(delta(1, "z", "stop"))
    assert len(pending) == 4
    # Reading a little and pausing again makes no difference.
    early = [await pending.get()]
    pending.put(delta(2, "!", "length"))
    pending.close()
    items = [item for item in early if item is not None] + await taken(pending)
    letters = "".join(chr(97 + number % 26) for number in range(10_000))
    for index, (more, reason) in enumerate([("", None), ("z", "stop"), ("!", "length")]):
        mine = [item for item in items if item.index == index]
        assert "".join(item.text for item in mine) == letters + more
        assert [entry.token_id for item in mine for entry in item.logprobs] == [ord(c) for c in letters + more]
        assert [item.finish_reason for item in mine if item.finish_reason] == ([reason] if reason else [])
    assert await pending.get() is None


async def test_outputs_for_a_gateway_without_credit_are_merged() -> None:
    sent: list[FromEngine] = []
    link = GatewayLink(sent.append)
    for number in range(50_000):
        tokens = tuple(SequenceOutput(sequence_id=name, token_ids=(number,)) for name in "ab")
        link.post(StepOutput(outputs=tokens))
    link.post(Finished(sequence_id="a", reason="length", prompt_tokens=1, completion_tokens=50_000))
    assert sent == []
    link.grant(1)
    [output, end] = sent
    assert isinstance(output, StepOutput)
    assert [(one.sequence_id, one.token_ids == tuple(range(50_000))) for one in output.outputs] == [
        ("a", True),
        ("b", True),
    ]
    assert isinstance(end, Finished)
    link.post(StepOutput(outputs=(SequenceOutput(sequence_id="b", token_ids=(1,)),)))
    assert len(sent) == 2


async def received_all(gateway: Any, num_choices: int = NUM_CHOICES) -> Generation:
    """Wait until the engine has finished the running request."""
    async with asyncio.timeout(30):
        while not gateway.services.run.requests._tasks:  # noqa: ASYNC110
            await asyncio.sleep(0.005)
        [generation] = gateway.services.run.requests._tasks.values()
        while generation.num_received < num_choices * NUM_TOKENS:  # noqa: ASYNC110
            await asyncio.sleep(0.005)
    assert isinstance(generation, Generation)
    return generation


async def test_stalled_reader_does_not_delay_settlement_or_other_clients(gateway: Any) -> None:
    gateway.engine.script = lambda add: Script(token_ids=tuple(300 + i % 7 for i in range(NUM_TOKENS)))
    may_send = asyncio.Event()
    sent: list[bytes] = []

    async def send(message: Any) -> None:
        # Block as uvicorn does while the socket's buffer is full.
        if message["type"] == "http.response.body":
            sent.append(message["body"])
            await may_send.wait()

    asking = asyncio.create_task(gateway.app(*call(gateway, BODY), send))
    generation = await received_all(gateway)
    assert len(sent) == 1
    assert generation.num_pending == 2 * NUM_CHOICES
    other = await gateway.openai.completions.create(model="base", prompt="a", max_tokens=8)
    assert other.usage.completion_tokens == 8
    async with asyncio.timeout(30):
        while len(gateway.usage()) < 2:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    may_send.set()
    async with asyncio.timeout(30):
        await asking
    *chunks, done = b"".join(sent).decode().removesuffix("\n\n").split("\n\n")
    assert done == "data: [DONE]"
    documents = [json.loads(chunk.removeprefix("data: ")) for chunk in chunks]
    assert documents[-1]["usage"]["completion_tokens"] == NUM_CHOICES * NUM_TOKENS
    whole = (await gateway.http.post("/v1/completions", json={**BODY, "stream": False, "stream_options": None})).json()
    for choice in whole["choices"]:
        mine = [one for document in documents for one in document["choices"] if one["index"] == choice["index"]]
        assert "".join(one["text"] for one in mine) == choice["text"]
        offsets = [offset for one in mine if one["logprobs"] for offset in one["logprobs"]["text_offset"]]
        assert offsets == choice["logprobs"]["text_offset"]
        assert [one["finish_reason"] for one in mine if one["finish_reason"]] == ["length"]


async def test_full_socket_blocks_only_its_own_stream(gateway: Any, gateway_url: str) -> None:
    gateway.engine.script = lambda add: Script(token_ids=(300,) * NUM_TOKENS)
    host, port = gateway_url.removeprefix("http://").split(":")
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.setblocking(False)
        loop = asyncio.get_running_loop()
        await loop.sock_connect(client, (host, int(port)))
        # Several times the amount that the kernel buffers for an unread socket.
        num_choices = 64
        content = json.dumps({**BODY, "n": num_choices}).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nhost: {host}\r\nauthorization: Bearer {gateway.key}\r\n"
        await loop.sock_sendall(client, f"{head}content-length: {len(content)}\r\n\r\n".encode() + content)
        generation = await received_all(gateway, num_choices)
        async with asyncio.timeout(30):
            while not gateway.usage():  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        assert 0 < generation.num_pending <= 2 * num_choices
        assert (await gateway.openai.completions.create(model="base", prompt="a", max_tokens=8)).usage is not None
        assert generation.num_pending > 0, "the server reads only a limited way ahead"


def call(gateway: Any, body: Any) -> tuple[Any, Any]:
    messages = [{"type": "http.request", "body": json.dumps(body).encode(), "more_body": False}]

    async def receive() -> Any:
        if not messages:
            await asyncio.Event().wait()
        return messages.pop()

    scope = {
        "type": "http",
        "method": "POST",
        "path": "/v1/completions",
        "raw_path": b"/v1/completions",
        "query_string": b"",
        "headers": [(b"authorization", f"Bearer {gateway.key}".encode()), (b"content-type", b"application/json")],
        "http_version": "1.1",
        "scheme": "http",
        "server": ("gateway", 80),
        "client": ("client", 1),
        "root_path": "",
    }
    return scope, receive
