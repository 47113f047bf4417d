"""`truncation: "auto"`: drops the oldest messages of a conversation that does not fit into the context."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from loramux.platform.bodies.conversation import ChatMessage
from loramux.platform.errors import InvalidRequest
from loramux.platform.generation.plan import Target
from loramux.platform.requests.chat_preparation import prepare_chat
from loramux.platform.requests.endpoint import Prepared, Received
from loramux.platform.requests.services import GatewayServices
from loramux.platform.responses_api.response_chat import ResponseChat


async def prepare_response(services: GatewayServices, target: Target, received: Received[ResponseChat]) -> Prepared:
    """Render and tokenise the conversation. With `truncation: "auto"`, the first messages after the system messages are
    dropped until the rest leaves room for the answer. Raises InvalidRequest, RateLimited or Unavailable.
    """
    body = received.body
    if body.asked.truncation != "auto":
        return await prepare_chat(services, target, received)
    most = services.max_model_len - (body.asked.max_output_tokens or 1)
    prepared = await _fitting(services, target, received, most)
    starts = _later_starts(body.messages)
    # Many templates expect a user's message first, so the others are only for long turns of the model.
    for allowed in ([start for start in starts if body.messages[start].role == "user"], starts):
        prepared = prepared or await _longest(services, target, received, allowed, most)
    return prepared or await prepare_chat(services, target, received)


async def _longest(
    services: GatewayServices, target: Target, received: Received[ResponseChat], starts: Sequence[int], most: int
) -> Prepared | None:
    """Prepare the longest conversation that fits and begins with one of the messages, or return None.

    Shorter conversations need fewer tokens, so the search bisects. The shortest is tried first, because a request that
    is refused costs its sender nothing and must not be rendered a dozen times.
    """
    best = await _fitting(services, target, _shortened(received, starts[-1]), most) if starts else None
    if best is None:
        return None
    low, high = 0, len(starts) - 2
    while low <= high:
        middle = (low + high) // 2
        prepared = await _fitting(services, target, _shortened(received, starts[middle]), most)
        if prepared is None:
            low = middle + 1
        else:
            high, best = middle - 1, prepared
    return best


async def _fitting(
    services: GatewayServices, target: Target, received: Received[ResponseChat], most: int
) -> Prepared | None:
    """Prepare a conversation, or return None if it has more than `most` tokens."""
    try:
        prepared = await prepare_chat(services, target, received)
    except InvalidRequest as error:
        if error.code != "context_length_exceeded":
            raise
        return None
    return prepared if len(prepared.prompts[0]) <= most else None


def _num_kept(messages: Sequence[ChatMessage]) -> int:
    """Return the number of system messages at the beginning, which are never dropped."""
    is_system = [message.role in ("system", "developer") for message in messages]
    return is_system.index(False) if False in is_system else len(messages)


def _later_starts(messages: Sequence[ChatMessage]) -> list[int]:
    """Return the indices of the messages with which a shortened conversation can begin after the system messages.

    No later message can be the output of a call before it.
    """
    starts: list[int] = []
    unmade: set[str | None] = set()
    for index in reversed(range(_num_kept(messages) + 1, len(messages))):
        message = messages[index]
        unmade -= {call.id for call in message.tool_calls or ()}
        if message.role == "tool":
            unmade.add(message.tool_call_id)
        if not unmade:
            starts.append(index)
    return starts[::-1]


def _shortened(received: Received[ResponseChat], start: int) -> Received[ResponseChat]:
    messages = received.body.messages
    kept = [*messages[: _num_kept(messages)], *messages[start:]]
    return replace(received, body=received.body.model_copy(update={"messages": kept}))
