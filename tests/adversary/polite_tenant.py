"""Sends requests at a steady rate and times each first token: `python -m tests.adversary.polite_tenant`.

The tenant runs in its own process, so that the attacker cannot distort its timings. It reads its settings from standard
input as one line of JSON, sends requests until standard input is closed, and then prints one line of JSON per request.
It prints nothing before, because a full pipe would stop it. Runs with the same seed send requests at the same times, so
that an attack and a quiet period can be compared.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
import time
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class PoliteSettings:
    port: int
    key: str
    model: str
    seed: int
    """Seed for the times at which requests are sent."""
    prompt_seed: int
    requests_per_s: float = 20.0
    max_tokens: int = 8
    path: str = "/v1/completions"
    kind: str = "completion"
    """`completion`, `chat`, or `new schema`: a completion that follows a small schema, different in each request."""


@dataclass(frozen=True, slots=True)
class Asked:
    status: int
    """HTTP status, or 0 if the connection failed."""
    first_token_s: float | None
    """Seconds from opening the connection to receiving the first text."""
    is_complete: bool
    """True if the stream ended with `[DONE]`."""
    gaps_s: list[float]
    """Seconds between the arrivals of the answer's tokens."""


async def ask_at_a_steady_rate(settings: PoliteSettings, over: asyncio.Event) -> list[Asked]:
    """Send requests as a Poisson process. A slow request does not delay the next."""
    dice, prompt_dice = random.Random(settings.seed), random.Random(settings.prompt_seed)
    tasks: list[asyncio.Task[Asked]] = []
    next_s = time.monotonic()
    while not over.is_set():
        next_s += dice.expovariate(settings.requests_per_s)
        await asyncio.sleep(next_s - time.monotonic())
        tasks.append(asyncio.create_task(ask(settings, prompt_dice)))
    return await asyncio.gather(*tasks)


async def ask(settings: PoliteSettings, dice: random.Random) -> Asked:
    """Stream one answer on a new connection. The random prompt prevents cache hits."""
    body = json.dumps(
        {"model": settings.model, "max_tokens": settings.max_tokens, "stream": True, **_question(settings.kind, dice)}
    ).encode()
    head = (
        f"POST {settings.path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-type: application/json\r\n"
        f"authorization: Bearer {settings.key}\r\ncontent-length: {len(body)}\r\n\r\n"
    ).encode()
    started = time.monotonic()
    first_token_s = None
    received = b""
    arrivals_s: list[float] = []
    try:
        async with asyncio.timeout(60):
            reader, writer = await asyncio.open_connection("127.0.0.1", settings.port)
            try:
                writer.write(head + body)
                while data := await reader.read(65536):
                    received += data
                    if first_token_s is None and b"data: " in received:
                        first_token_s = time.monotonic() - started
                    # The end of an answer arrives after its settlement in the database, so it is no token.
                    if first_token_s is not None and b'"finish_reason":"' not in received:
                        arrivals_s.append(time.monotonic())
            finally:
                writer.transport.abort()
    except OSError:
        pass
    status = int(received[9:12]) if len(received) >= 12 else 0
    gaps_s = [later - earlier for earlier, later in pairwise(arrivals_s)]
    return Asked(status, first_token_s, b"data: [DONE]" in received, gaps_s)


def _question(kind: str, dice: random.Random) -> dict[str, Any]:
    prompt = [dice.randrange(3, 500) for _ in range(48)]
    match kind:
        case "chat":
            return {"messages": [{"role": "user", "content": f"What is {prompt}?"}]}
        case "new schema":
            properties = {f"field_{dice.randrange(10**9)}": {"type": "integer"} for _ in range(4)}
            schema = {"type": "object", "properties": properties, "required": list(properties)}
            return {"prompt": prompt, "guided_json": schema}
        case _:
            return {"prompt": prompt, "ignore_eos": True}


async def main() -> None:
    settings = PoliteSettings(**json.loads(sys.stdin.readline()))
    over = asyncio.Event()
    loop = asyncio.get_running_loop()

    def end() -> None:
        loop.remove_reader(sys.stdin.fileno())
        over.set()

    loop.add_reader(sys.stdin.fileno(), end)
    for asked in await ask_at_a_steady_rate(settings, over):
        print(json.dumps(asdict(asked)))


if __name__ == "__main__":
    asyncio.run(main())
