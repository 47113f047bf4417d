"""Defines how generation endpoints differ in reading prompts from a body and in building a response."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, Self, TypeAlias, TypeVar

from loramux.platform.bodies.generation_request import GenerationRequest
from loramux.platform.generation.choice import ChoiceDelta
from loramux.platform.generation.generation import Usage
from loramux.platform.generation.plan import Plan, Reasoning, Target
from loramux.platform.grammars.constraint import Constraint
from loramux.platform.requests.answers import Answer, RawAnswer, WholeAnswer
from loramux.platform.requests.services import GatewayServices
from loramux.platform.tool_calls.harmony import Channels
from loramux.platform.tool_calls.parsers import find_parser


class Body(Protocol):
    """What the life of a request reads from any endpoint's body."""

    @property
    def model(self) -> str: ...

    @property
    def user(self) -> str | None: ...

    @property
    def stream(self) -> bool | None: ...

    @property
    def has_long_answer(self) -> bool:
        """True if building the response's body takes so long that it happens on a thread."""

    def shown_as(self, *, with_usage: bool, by_token_id: bool) -> Self:
        """Return the body with what the server shows by default."""

    def check(self) -> None:
        """Check rules that concern several fields. Raises InvalidRequest."""


B = TypeVar("B", bound=GenerationRequest)
P = TypeVar("P", bound=Body)
B_co = TypeVar("B_co", bound=Body, covariant=True)

Prompts = tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class Prepared:
    prompts: Prompts
    reasoning: Reasoning | None = None
    """None if the answer contains no reasoning."""
    tool_format: str | None = None
    """The format of tool calls. None if the request offers no tools, or if calls are not parsed."""
    channels: Channels | None = None
    """The rules for reading the answer's channels. None if the answer has no channels."""
    bad_words: tuple[tuple[int, ...], ...] = ()
    """The token ids of words that the answer must not contain."""
    prediction: tuple[int, ...] = ()
    """The token ids of a text that the answers will probably contain."""
    activations: tuple[int | None, ...] = ()
    """See `Plan.activations`. Set after the prompts have been truncated."""

    @property
    def markers(self) -> tuple[str, ...]:
        """The markers of calls and reasoning that are part of the answer's text."""
        if self.channels is not None:
            return ()
        parser = None if self.tool_format is None else find_parser(self.tool_format)
        calls = () if parser is None else (*parser.markers, *parser.ends)
        return calls if self.reasoning is None else (*calls, self.reasoning.markers.begin, self.reasoning.markers.end)


@dataclass(frozen=True, slots=True)
class Received(Generic[B_co]):
    """A request with its validated body. `num_bytes` is the body's length."""

    request_id: str
    body: B_co
    num_bytes: int


def longest_prompt(services: GatewayServices, body: GenerationRequest) -> int | None:
    """Return the maximum length of a prompt in tokens, or None if longer prompts are truncated."""
    return services.max_model_len if body.truncate_prompt_tokens is None else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint(Generic[B]):
    name: str
    parse: Callable[[dict[str, Any]], B]
    """Validates a JSON object as the body, without the checks of `GenerationRequest.check`. Raises InvalidRequest."""
    prepare: Callable[[GatewayServices, Target, Received[B]], Awaitable[Prepared]]
    """Tokenises a body's prompts. Raises InvalidRequest, RateLimited or Unavailable."""
    constraint: Callable[[Target, B, Prepared], Constraint | None]
    """The constraint on the answer. Raises InvalidRequest."""
    shape: Callable[[GatewayServices, Target, Received[B], Prepared], Awaitable[Answer]]
    """Creates the object that builds the response bodies. Called before generation starts."""
    keep: Callable[[Answer, Sequence[ChoiceDelta], Usage], Awaitable[None]] | None = None
    """Stores a complete answer. Called with the deltas that `Answer.events` has not received, before `Answer.end` or
    `Answer.whole`. It raises nothing, because the answer is already charged.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class PooledEndpoint(Generic[P]):
    """An endpoint whose answers come from the prompts' pooled states. It is never streamed."""

    name: str
    parse: Callable[[dict[str, Any]], P]
    """Validates a JSON object as the body, without the checks of `Body.check`. Raises InvalidRequest."""
    plan: Callable[[GatewayServices, Target, Received[P]], Awaitable[tuple[Plan, WholeAnswer | RawAnswer]]]
    """Tokenises a body's prompts, and creates the plan and the object that builds the response's body. Raises
    InvalidRequest."""


AnyEndpoint: TypeAlias = Endpoint[Any] | PooledEndpoint[Any]
