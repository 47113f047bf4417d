"""Stores chat completions once they are complete."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

import structlog
from sqlalchemy.exc import SQLAlchemyError

from loramux.platform.admission.database_health import DatabaseTrouble
from loramux.platform.bodies.chat_request import ChatRequest
from loramux.platform.bodies.conversation import ChatMessage
from loramux.platform.bodies.tools import ToolChoice
from loramux.platform.errors import ApiError
from loramux.platform.generation.choice import ChoiceDelta
from loramux.platform.generation.generation import Usage
from loramux.platform.generation.pending_deltas import JoinedDeltas
from loramux.platform.generation.plan import Target
from loramux.platform.openai_api.chunks import ChunkedAnswer
from loramux.platform.quotas.decisions import QuotaExceeded
from loramux.platform.requests.answers import Answer, Document
from loramux.platform.requests.endpoint import Received
from loramux.platform.requests.services import GatewayServices
from loramux.platform.requests.storing import call_storing, check_room
from loramux.platform.stored_responses.chat_store import StoredChat

Store = Callable[[Document], Awaitable[None]]
"""Stores a chat completion. Raises nothing."""
Build = Callable[[Sequence[ChoiceDelta], Usage], Document]
Compute = Callable[[Build, Sequence[ChoiceDelta], Usage], Awaitable[Document]]

_MESSAGE_FIELDS = ("name", "tool_calls", "tool_call_id", "reasoning_content", "reasoning")
log = structlog.get_logger(__name__)


class StoredChatAnswer:
    """An `Answer` that is also stored. `compute` runs slow functions on a thread."""

    def __init__(self, shown: ChunkedAnswer, compute: Compute, store: Store) -> None:
        self._shown = shown
        self._compute = compute
        self._store = store
        self._choices: dict[int, JoinedDeltas] = {}
        self._whole: Document | None = None

    def events(self, delta: ChoiceDelta) -> bytes:
        self._choices.setdefault(delta.index, JoinedDeltas()).add(delta)
        return self._shown.events(delta)

    def end(self, usage: Usage) -> bytes:
        return self._shown.end(usage)

    def failure(self, error: ApiError) -> bytes:
        return self._shown.failure(error)

    def whole(self, deltas: Sequence[ChoiceDelta], usage: Usage) -> Document:
        return self._whole if self._whole is not None else self._shown.whole(deltas, usage)

    async def keep(self, deltas: Sequence[ChoiceDelta], usage: Usage) -> None:
        """Store the answer. `deltas` are those that `events` has not received."""
        collected = [*(choice.delta() for choice in self._choices.values()), *deltas]
        self._whole = await self._compute(self._shown.whole, collected, usage)
        await self._store(self._whole)


async def keep_chat(answer: Answer, deltas: Sequence[ChoiceDelta], usage: Usage) -> None:
    if isinstance(answer, StoredChatAnswer):
        await answer.keep(deltas, usage)


async def stored_if_asked(
    shown: ChunkedAnswer, services: GatewayServices, target: Target, received: Received[ChatRequest]
) -> Answer:
    """Return an answer that is stored if the request asks for it and the tenant allows it.

    Raises QuotaExceeded if there is no room.
    """
    body, days, adapter = received.body, target.share.response_days, target.model.adapter
    if not body.store or not services.stored.is_open or days == 0:
        return shown
    await check_room(services, target.tenant_id)

    async def store(completion: Document) -> None:
        stored = StoredChat(
            id=completion["id"],
            tenant_id=target.tenant_id,
            adapter_id=None if adapter is None else adapter.adapter_id,
            completion={**completion, **_asked(received, target)},
        )
        messages = [_message(message, f"{stored.id}-{index}") for index, message in enumerate(body.messages)]
        try:
            is_stored = await call_storing(services, services.stored.chats.put, stored, messages, days)
        except (SQLAlchemyError, DatabaseTrouble, QuotaExceeded) as error:
            # The answer is complete and charged, so the client gets it.
            log.warning("a chat completion could not be stored", error=repr(error))
        else:
            if not is_stored:
                log.warning("a chat completion was too long to be stored", completion=stored.id)

    return StoredChatAnswer(shown, services.compute, store)


def _asked(received: Received[ChatRequest], target: Target) -> Document:
    """Return the fields of a stored chat completion that repeat the request, with the defaults that apply."""
    body = received.body
    sampling = body.sampling(target.settings.defaults)
    return {
        "request_id": received.request_id,
        "metadata": body.metadata or {},
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "presence_penalty": sampling.presence_penalty,
        "frequency_penalty": sampling.frequency_penalty,
        "seed": body.seed,
        "tools": None if body.tools is None else [tool.model_dump(exclude_none=True) for tool in body.tools],
        "tool_choice": None if body.tool_choice is None else _choice(body.choice_of_tools),
        "response_format": (
            None if body.response_format is None else body.response_format.model_dump(by_alias=True, exclude_none=True)
        ),
        "service_tier": target.tiers.tier(body.service_tier),
        "input_user": body.user,
    }


def _choice(choice: ToolChoice) -> str | Document:
    if choice.names is None:
        return choice.mode
    functions = [{"type": "function", "function": {"name": name}} for name in sorted(choice.names)]
    if choice.mode == "named":
        return functions[0]
    return {"type": "allowed_tools", "allowed_tools": {"mode": choice.mode, "tools": functions}}


def _message(message: ChatMessage, message_id: str) -> Document:
    given = message.model_dump(include=set(_MESSAGE_FIELDS), exclude_none=True)
    is_text = message.content is None or isinstance(message.content, str)
    parts = None if is_text else [{"type": "text", "text": text} for text in message.content or ()]
    content = message.content if is_text else message.text
    return {"id": message_id, "role": message.role, "content": content, "content_parts": parts, **given}
