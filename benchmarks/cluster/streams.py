"""Streams whose tokens carry the time, and what getting them to a client took."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import accumulate

from benchmarks.gateway.clients import Address, Load, Received, post, repeat
from benchmarks.peers.system import SystemFailed
from benchmarks.sharing.stamping_engine import passed_s

_STAMPS = re.compile(rb'"token_logprobs":\[([-0-9.,e+]+)\]')
NUM_PROMPT = 32


@dataclass(slots=True)
class Overheads:
    """`requests_s` are times from sending a request to its first token, which the engine sends at once. `chunks_s` are
    times from the engine to the client, of all later tokens.
    """

    requests_s: list[float] = field(default_factory=list)
    chunks_s: list[float] = field(default_factory=list)


async def measure(address: Address, model: str, load: Load) -> Overheads:
    """Raises SystemFailed if an answer fails or has not the requested number of tokens."""
    body = {
        "model": model,
        "prompt": list(range(300, 300 + NUM_PROMPT)),
        "max_tokens": load.num_tokens,
        "temperature": 0.0,
        "ignore_eos": True,
        "logprobs": 0,
        "stream": True,
    }
    outcome = await repeat(address.port, post(address, "/v1/completions", body), load)
    found = Overheads()
    for received in outcome.answers:
        note_answer(received, load.num_tokens, found)
    return found


def note_answer(received: Received, num_tokens: int, found: Overheads) -> None:
    whole = b"".join(received.data)
    chunks = list(_chunks(received, whole))
    count = sum(len(stamps) for stamps, _ in chunks)
    if not whole.startswith(b"HTTP/1.1 200") or b"data: [DONE]" not in whole or count != num_tokens:
        raise SystemFailed(f"an answer has {count} tokens instead of {num_tokens}: {whole[:500]!r}")
    found.requests_s.append(chunks[0][1] - received.sent_s)
    found.chunks_s += [passed_s(stamps[0], time_s) for stamps, time_s in chunks[1:]]


def _chunks(received: Received, whole: bytes) -> Iterator[tuple[list[float], float]]:
    """The stamps of each chunk, and the time of the read that brought it."""
    ends = list(accumulate(map(len, received.data)))
    for match in _STAMPS.finditer(whole):
        stamps = [float(stamp) for stamp in match[1].split(b",")]
        yield stamps, received.times_s[bisect_right(ends, match.end() - 1)]
