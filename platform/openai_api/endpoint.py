"""The differences between generation endpoints: how a body becomes prompts, and how a generation becomes a response."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from loramux.platform.openai_api.answers import Answer
from loramux.platform.openai_api.schemas import GenerationRequest
from loramux.platform.openai_api.services import GatewayServices

B = TypeVar("B", bound=GenerationRequest)

Prompts = tuple[tuple[int, ...], ...]
"""The token ids of each prompt."""


@dataclass(frozen=True, slots=True)
class Received(Generic[B]):
    """A request with its checked body; `num_bytes` is the body's length."""

    request_id: str
    body: B
    num_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint(Generic[B]):
    """One endpoint. The type of its body, in `schemas.py`, defines the fields that it accepts."""

    name: str
    """The endpoint's name in the ledger and the metrics."""
    body: type[B]
    tokenise: Callable[[GatewayServices, B], Prompts]
    """Tokenises a body's prompts, which is slow if they are long. Raises InvalidRequest."""
    shape: Callable[[GatewayServices, Received[B]], Awaitable[Answer]]
    """Creates the builder of response bodies, before generation starts."""
