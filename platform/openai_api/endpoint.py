"""What tells the endpoints of generation apart: how a body becomes prompts, and how the answer is shaped."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from loramux.platform.openai_api.answers import Answer
from loramux.platform.openai_api.schemas import GenerationRequest
from loramux.platform.openai_api.services import GatewayServices

B = TypeVar("B", bound=GenerationRequest)

Prompts = tuple[tuple[int, ...], ...]
"""Token ids, prompt by prompt."""


@dataclass(frozen=True, slots=True)
class Received(Generic[B]):
    """A request whose body was read and checked; `num_bytes` is the body's length."""

    request_id: str
    body: B
    num_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint(Generic[B]):
    """One endpoint. `schemas.py` has the rest of what it accepts, in the type of its body."""

    name: str
    """In the ledger and the metrics."""
    body: type[B]
    tokenise: Callable[[GatewayServices, B], Prompts]
    """The prompts of a body; takes long for a long one. Raises InvalidRequest."""
    shape: Callable[[GatewayServices, Received[B]], Awaitable[Answer]]
    """The bodies of the answer, before any of it is known."""
