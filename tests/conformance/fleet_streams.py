"""Streams to servers that share requests, and what their clients received."""

from __future__ import annotations

import random
import re
from dataclasses import dataclass
from typing import Any

from tests.conformance.drawn_requests import DrawnRequest, streamed_completion
from tests.conformance.gateway_lab import LabGateway, send, usage_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Stream:
    """A request, and everything that its client received. The status is 0 if the client received nothing."""

    gateway: LabGateway
    request: DrawnRequest
    status: int
    answer: bytes

    @property
    def request_id(self) -> str | None:
        found = re.search(rb"x-request-id: (\S+)", self.answer)
        return None if found is None else found[1].decode()

    @property
    def is_complete(self) -> bool:
        return usage_of(self.answer) is not None

    @property
    def is_ended_by_error(self) -> bool:
        return b'"code":"engine_unavailable"' in self.answer

    @property
    def num_prompt(self) -> int:
        return len(self.request.body["prompt"])

    @property
    def num_received(self) -> int:
        return sum(len(ids.split(b",")) for ids in re.findall(rb'"token_ids":\[([0-9,]+)\]', self.answer))


def numbered_stream(dice: random.Random, model: str) -> DrawnRequest:
    """A stream in which each token is sent at once with its number."""
    prompt = [dice.randrange(5, 1000) for _ in range(dice.randint(1, 40))]
    told = {"logprobs": 1, "return_token_ids": True}
    return streamed_completion(dice.randint(20, 200), model=model, prompt=prompt, **told)


async def send_stream(gateway: LabGateway, key: str, request: DrawnRequest) -> Stream:
    try:
        status, answer = await send(gateway.port, key, request)
    except ConnectionError:
        status, answer = 0, b""
    return Stream(gateway=gateway, request=request, status=status, answer=answer)


def is_billed_as_received(one: Stream, events: dict[str, Any]) -> bool:
    assert one.request_id is not None
    event = events.get(one.request_id)
    return event is not None and (event.prompt_tokens, event.completion_tokens) == (one.num_prompt, one.num_received)
