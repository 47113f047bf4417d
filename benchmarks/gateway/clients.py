"""The scripted answers, and clients that create load.

Each client sends its next request on its connection as soon as the previous answer has ended. The clients keep what
they receive, with the time of each read, and `read_answer` parses it after the clock has stopped.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import uvloop

from benchmarks.peers.system import SystemFailed
from loramux.platform.tokenizer.model_tokenizer import ModelTokenizer

NUM_DIFFERENT = 64
"""Number of different tokens. Longer answers repeat them."""

ANSWER_S = 300.0
"""Longest wait for all answers of one load, in seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """The requests of one load. A running answer gains one token per `step_us`; 0 means all tokens at once."""

    num_clients: int
    num_tokens: int
    is_streamed: bool
    step_us: int
    seconds: float
    """Time in which clients begin requests. They wait for the answers to all requests that have begun."""
    ramp_s: float = 0.0
    """Time over which the clients start, one after another."""


@dataclass(frozen=True, slots=True)
class Script:
    """The tokens of an answer, in order. `texts[i]` is the text of `token_ids[i]`.

    A request's `seed` is the length of a step in microseconds. Each running answer gains one token per step. With a
    `seed` of 0, the whole answer is ready at once.
    """

    token_ids: Sequence[int]
    texts: Sequence[str]

    @staticmethod
    def of(tokenizer: ModelTokenizer) -> Script:
        """A script of tokens that are ASCII words or parts of such words."""
        found: dict[int, str] = {}
        for token_id in range(tokenizer.num_tokens):
            text = tokenizer.text_bytes(token_id).decode("ascii", "replace")
            if text.strip().isalpha() and text.isascii():
                found[token_id] = text
            if len(found) == NUM_DIFFERENT:
                break
        return Script(tuple(found), tuple(found.values()))

    def text(self, num_tokens: int) -> str:
        """The text of an answer of `num_tokens` tokens."""
        return "".join(self.texts[position % len(self.texts)] for position in range(num_tokens))


@dataclass(frozen=True, slots=True)
class Address:
    """The port that a system listens on, and a key that it accepts."""

    port: int
    api_key: str


@dataclass(slots=True)
class Received:
    """One answer: its bytes, and the times of the reads that brought them."""

    sent_s: float
    data: list[bytes] = field(default_factory=list)
    times_s: list[float] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Outcome:
    """All answers of one load, and the seconds from the first request to the last byte."""

    answers: list[Received]
    seconds: float


class Client(asyncio.Protocol):
    def __init__(self, request: bytes, is_streamed: bool, end_s: float, into: list[Received]) -> None:
        self._request = request
        self._is_streamed = is_streamed
        self._end_s = end_s
        self._into = into
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._transport = transport
        self._ask()

    def _ask(self) -> None:
        self._current = Received(time.perf_counter())
        self._into.append(self._current)
        self._transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        current = self._current
        current.data.append(data)
        current.times_s.append(time.perf_counter())
        if self._has_ended(data):
            if time.perf_counter() < self._end_s:
                self._ask()
            else:
                self._finish()

    def _has_ended(self, data: bytes) -> bool:
        if self._is_streamed:
            # The last chunk can be split between two reads.
            tail = data if len(data) > 5 else b"".join(self._current.data)
            return tail.endswith(b"0\r\n\r\n")
        whole = b"".join(self._current.data)
        head, found, body = whole.partition(b"\r\n\r\n")
        return bool(found) and len(body) >= _content_length(head)

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.done.done():
            self.done.set_exception(SystemFailed(f"a connection was closed: {exc}"))

    def _finish(self) -> None:
        self.done.set_result(None)
        self._transport.close()


def run_load(address: Address, load: Load) -> Outcome:
    """Run a load and return all answers, not yet parsed. Raises SystemFailed if a connection breaks."""
    return uvloop.run(repeat(address.port, _request(address, load), load))


async def repeat(port: int, request: bytes, load: Load) -> Outcome:
    """Let the clients of a load send `request` again and again. Raises SystemFailed if a connection breaks."""
    loop = asyncio.get_running_loop()
    answers: list[Received] = []
    started_s = time.perf_counter()

    async def run_client(number: int) -> None:
        await asyncio.sleep(load.ramp_s * number / load.num_clients)
        _, client = await loop.create_connection(
            lambda: Client(request, load.is_streamed, started_s + load.seconds, answers), "127.0.0.1", port
        )
        await client.done

    async with asyncio.timeout(ANSWER_S):
        await asyncio.gather(*map(run_client, range(load.num_clients)))
    return Outcome(answers, time.perf_counter() - started_s)


def _request(address: Address, load: Load) -> bytes:
    body: dict[str, Any] = {
        "model": "base",
        "messages": [{"role": "user", "content": "Hello"}],
        "max_tokens": load.num_tokens,
        "seed": load.step_us,
    }
    if load.is_streamed:
        body |= {"stream": True, "stream_options": {"include_usage": True}}
    return post(address, "/v1/chat/completions", body)


def post(address: Address, path: str, body: dict[str, Any]) -> bytes:
    """The bytes of a POST request with a JSON body."""
    encoded = msgspec.json.encode(body)
    head = (
        f"POST {path} HTTP/1.1\r\nhost: 127.0.0.1:{address.port}\r\n"
        f"authorization: Bearer {address.api_key}\r\ncontent-type: application/json\r\n"
        f"content-length: {len(encoded)}\r\n\r\n"
    )
    return head.encode() + encoded


def check_answers(outcome: Outcome, load: Load, script: Script) -> None:
    """Raise SystemFailed unless each answer has the script's text and the requested number of tokens."""
    text = script.text(load.num_tokens)
    for received in outcome.answers:
        found, num_tokens = read_answer(b"".join(received.data), load.is_streamed)
        if (found, num_tokens) != (text, load.num_tokens):
            raise SystemFailed(f"an answer of {num_tokens} tokens instead of {load.num_tokens}: {found[:200]!r}")


def read_answer(data: bytes, is_streamed: bool) -> tuple[str, int]:
    """The text and the number of tokens of an answer. Raises SystemFailed if the status is not 200."""
    head, _, body = data.partition(b"\r\n\r\n")
    if not head.startswith(b"HTTP/1.1 200"):
        raise SystemFailed(f"an answer is {data[:500]!r}")
    if not is_streamed:
        document = msgspec.json.decode(body)
        return document["choices"][0]["message"]["content"], document["usage"]["completion_tokens"]
    texts, num_tokens = [], 0
    lines = _without_chunk_sizes(body).split(b"\n")
    documents = [msgspec.json.decode(line[6:]) for line in lines if line.startswith(b"data: {")]
    for document in documents:
        texts += [choice["delta"].get("content") or "" for choice in document["choices"]]
        num_tokens = (document.get("usage") or {}).get("completion_tokens", num_tokens)
    if b"data: [DONE]" not in lines:
        raise SystemFailed(f"a stream ended early: {body[-500:]!r}")
    return "".join(texts), num_tokens


def _without_chunk_sizes(body: bytes) -> bytes:
    parts, position = [], 0
    while position < len(body):
        end = body.index(b"\r\n", position)
        length = int(body[position:end], 16)
        parts.append(body[end + 2 : end + 2 + length])
        position = end + length + 4
    return b"".join(parts)


def _content_length(head: bytes) -> int:
    _, found, length = head.lower().partition(b"\r\ncontent-length:")
    if not found:
        raise SystemFailed(f"an answer has no length: {head!r}")
    return int(length.split(b"\r\n", 1)[0])
