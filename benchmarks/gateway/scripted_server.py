"""An OpenAI-compatible server without a model: `python -m benchmarks.gateway.scripted_server PORT TEXTS`.

It is LiteLLM's back end. Called directly, it shows the highest rates that the clients can measure.
"""

from __future__ import annotations

import asyncio
import sys
from typing import Any

import msgspec
import uvloop

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
STREAM_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
SHARED = {"id": "chatcmpl-script", "created": 1_700_000_000, "model": "base"}
PROMPT_TOKENS = 8


class Pacer:
    """Advances all streams with the same step time together, as an engine does."""

    def __init__(self, step_s: float) -> None:
        self._step_s = step_s
        self._streams: dict[Stream, None] = {}
        self._next_s = 0.0

    def add(self, stream: Stream) -> None:
        loop = asyncio.get_running_loop()
        if not self._streams:
            self._next_s = loop.time() + self._step_s
            loop.call_at(self._next_s, self._step)
        self._streams[stream] = None

    def _step(self) -> None:
        for stream in list(self._streams):
            if stream.step():
                del self._streams[stream]
        if self._streams:
            loop = asyncio.get_running_loop()
            # Do not make up for missed steps.
            self._next_s = max(loop.time(), self._next_s + self._step_s)
            loop.call_at(self._next_s, self._step)


class Stream:
    def __init__(self, transport: asyncio.Transport, chunks: list[bytes], num_tokens: int, has_usage: bool) -> None:
        self._transport = transport
        self._chunks = chunks
        self._num_tokens = num_tokens
        self._has_usage = has_usage
        self._num_sent = 0
        transport.write(STREAM_HEAD)

    def step(self) -> bool:
        """Send the next token. Return True once the stream has ended."""
        if self._transport.is_closing():
            return True
        chunk = self._chunks[self._num_sent % len(self._chunks)]
        self._num_sent += 1
        if self._num_sent < self._num_tokens:
            self._transport.write(chunk)
            return False
        ends = [_event({"choices": [{"index": 0, "delta": {}, "finish_reason": "length"}]})]
        if self._has_usage:
            ends.append(_event({"choices": [], "usage": _usage(self._num_tokens)}))
        self._transport.write(chunk + b"".join(ends) + _chunked(b"data: [DONE]\n\n") + b"0\r\n\r\n")
        return True


class Connection(asyncio.Protocol):
    def __init__(self, texts: list[str], chunks: list[bytes], pacers: dict[int, Pacer]) -> None:
        self._texts = texts
        self._chunks = chunks
        self._pacers = pacers
        self._received = bytearray()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._received += data
        while (end := self._received.find(b"\r\n\r\n")) >= 0:
            head = bytes(self._received[:end]).lower()
            _, found, length = head.partition(b"\r\ncontent-length:")
            whole = end + 4 + (int(length.split(b"\r\n", 1)[0]) if found else 0)
            if len(self._received) < whole:
                return
            body = bytes(self._received[end + 4 : whole])
            del self._received[:whole]
            self._answer(msgspec.json.decode(body) if body else None)

    def _answer(self, body: Any) -> None:
        if body is None:
            # A call without a body only asks whether the server is up.
            self._transport.write(HEAD % 2 + b"{}")
            return
        num_tokens, step_us = body["max_tokens"], body.get("seed") or 0
        if body.get("stream"):
            has_usage = (body.get("stream_options") or {}).get("include_usage", False)
            stream = Stream(self._transport, self._chunks, num_tokens, has_usage)
            pacer = self._pacers.get(step_us)
            if pacer is None:
                pacer = self._pacers[step_us] = Pacer(step_us / 1e6)
            pacer.add(stream)
            return
        texts = self._texts
        content = "".join(texts[position % len(texts)] for position in range(num_tokens))
        message = {"role": "assistant", "content": content}
        choice = {"index": 0, "message": message, "finish_reason": "length"}
        document = {**SHARED, "object": "chat.completion", "choices": [choice], "usage": _usage(num_tokens)}
        encoded = msgspec.json.encode(document)
        self._transport.write(HEAD % len(encoded) + encoded)


def _usage(num_tokens: int) -> dict[str, int]:
    total = PROMPT_TOKENS + num_tokens
    return {"prompt_tokens": PROMPT_TOKENS, "completion_tokens": num_tokens, "total_tokens": total}


def _event(document: dict[str, Any]) -> bytes:
    whole = {**SHARED, "object": "chat.completion.chunk", **document}
    return _chunked(b"data: " + msgspec.json.encode(whole) + b"\n\n")


def _chunked(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


async def serve(port: int, texts: list[str]) -> None:
    delta: list[dict[str, Any]] = [{"role": "assistant", "content": text} for text in texts]
    chunks = [_event({"choices": [{"index": 0, "delta": one, "finish_reason": None}]}) for one in delta]
    pacers: dict[int, Pacer] = {}
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: Connection(texts, chunks, pacers), "127.0.0.1", port)
    await server.serve_forever()


if __name__ == "__main__":
    uvloop.run(serve(int(sys.argv[1]), msgspec.json.decode(sys.argv[2], type=list[str])))
