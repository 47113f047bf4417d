"""The shapes of the OpenAI listener's answers, for its OpenAPI document; `chat_answer.py` and others build them."""

from __future__ import annotations

from typing import Any, Literal, NotRequired

from typing_extensions import TypedDict


class HealthDocument(TypedDict):
    """`engine`, `database` and `reason` are of `ready`; the last tells operators why it is not."""

    status: str
    engine: NotRequired[bool]
    database: NotRequired[bool]
    reason: NotRequired[str]


class ModelDocument(TypedDict):
    """A model that the caller may name. `root` is the version that it means now."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    parent: str | None
    max_model_len: int


class ModelList(TypedDict):
    """All that the caller may name."""

    object: Literal["list"]
    data: list[ModelDocument]


class PromptTokensDetails(TypedDict):
    """Of the prompt, what was in the prefix cache."""

    cached_tokens: int


class UsageDocument(TypedDict):
    """What the request is charged."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class CompletionChoice(TypedDict):
    """One continuation of a prompt."""

    text: str
    index: int
    logprobs: dict[str, Any] | None
    finish_reason: str | None


class CompletionDocument(TypedDict):
    """What `/v1/completions` answers whole."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: UsageDocument


class AnswerMessage(TypedDict):
    """What the model says."""

    role: Literal["assistant"]
    content: str
    refusal: None


class ChatChoice(TypedDict):
    """One answer."""

    index: int
    message: AnswerMessage
    logprobs: dict[str, Any] | None
    finish_reason: str | None


class ChatDocument(TypedDict):
    """What `/v1/chat/completions` answers whole."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: UsageDocument
