"""Schemas of the OpenAI listener's responses, for its OpenAPI document.

The bodies are built by `chat_answer.py` and other modules.
"""

from __future__ import annotations

from typing import Any, Literal, NotRequired

from typing_extensions import TypedDict


class ModelDocument(TypedDict):
    """A model that the caller may name. `root` is the version that it currently resolves to.

    `quantization` is the format of the base's weights, such as `int4`. It is null for floating-point weights, and while
    no engine is running. `task` is what the model is for.
    """

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    parent: str | None
    max_model_len: int
    quantization: str | None
    task: Literal["generation", "classification", "embedding"]


class ModelList(TypedDict):
    """All models that the caller may name in a request."""

    object: Literal["list"]
    data: list[ModelDocument]


class DeletedModel(TypedDict):
    """A model that was taken out of service. The admin API can put it back."""

    id: str
    object: Literal["model"]
    deleted: Literal[True]


class PromptTokensDetails(TypedDict):
    """The prompt tokens found in the prefix cache."""

    cached_tokens: int


class CompletionTokensDetails(TypedDict):
    """The completion tokens that belong to the reasoning, and the tokens of the prediction that were drafted. Rejected
    tokens are not part of the answer, and are not charged.
    """

    reasoning_tokens: NotRequired[int]
    accepted_prediction_tokens: NotRequired[int]
    rejected_prediction_tokens: NotRequired[int]


class UsageDocument(TypedDict):
    """The tokens charged for the request."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: NotRequired[CompletionTokensDetails]


class CompletionChoice(TypedDict):
    """One continuation of a prompt. `stop_reason` is the stop string or the named stop token that ended it. The fields
    after it are null unless the request asks for them.
    """

    text: str
    index: int
    logprobs: dict[str, Any] | None
    finish_reason: str | None
    stop_reason: str | int | None
    token_ids: list[int] | None
    prompt_token_ids: list[int] | None
    prompt_logprobs: list[dict[str, Any] | None] | None


class CompletionDocument(TypedDict):
    """A non-streamed response of `/v1/completions`. `system_fingerprint` is `sha256:` and the digest of the adapter's
    version, and absent for the base.
    """

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    service_tier: str
    system_fingerprint: NotRequired[str]
    choices: list[CompletionChoice]
    usage: UsageDocument


class CalledFunctionDocument(TypedDict):
    """A called function. `arguments` is a string of JSON."""

    name: str
    arguments: str


class ToolCallDocument(TypedDict):
    """A call that the client should answer with a `tool` message."""

    id: str
    type: Literal["function"]
    function: CalledFunctionDocument


class AnswerMessage(TypedDict):
    """The model's message. `content` is null if the message has tool calls and no text."""

    role: Literal["assistant"]
    content: str | None
    refusal: None
    reasoning: NotRequired[str]
    reasoning_content: NotRequired[str]
    tool_calls: NotRequired[list[ToolCallDocument]]


class ChatChoice(TypedDict):
    """One choice of a chat completion. `stop_reason` is the stop string or the named stop token that ended it.
    `token_ids` is null unless the request asks for it.
    """

    index: int
    message: AnswerMessage
    logprobs: dict[str, Any] | None
    finish_reason: str | None
    stop_reason: str | int | None
    token_ids: list[int] | None


class ChatDocument(TypedDict):
    """A non-streamed response of `/v1/chat/completions`. `system_fingerprint` is `sha256:` and the digest of the
    adapter's version, and absent for the base. The last two fields are null unless the request asks for them.
    """

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    service_tier: str
    system_fingerprint: NotRequired[str]
    choices: list[ChatChoice]
    usage: UsageDocument
    prompt_token_ids: list[int] | None
    prompt_logprobs: list[dict[str, Any] | None] | None


class StoredChatDocument(ChatDocument):
    """A stored chat completion. The fields of its own repeat the request."""

    request_id: str
    metadata: dict[str, str]
    temperature: float
    top_p: float
    presence_penalty: float
    frequency_penalty: float
    seed: int | None
    tools: list[dict[str, Any]] | None
    tool_choice: str | dict[str, Any] | None
    response_format: dict[str, Any] | None
    input_user: str | None


class StoredChatList(TypedDict):
    """A page of the stored chat completions. `last_id` is the `after` of the next page."""

    object: Literal["list"]
    data: list[StoredChatDocument]
    first_id: str | None
    last_id: str | None
    has_more: bool


class DeletedChat(TypedDict):
    """A stored chat completion that was deleted."""

    id: str
    object: Literal["chat.completion.deleted"]
    deleted: Literal[True]


class StoredMessageDocument(TypedDict):
    """A message of the request of a stored chat completion. `content_parts` is null if the content was a string."""

    id: str
    role: str
    content: str | None
    content_parts: list[dict[str, Any]] | None


class StoredMessageList(TypedDict):
    """A page of the messages of a stored chat completion. `last_id` is the `after` of the next page."""

    object: Literal["list"]
    data: list[StoredMessageDocument]
    first_id: str | None
    last_id: str | None
    has_more: bool


class TokenizeDocument(TypedDict):
    """The token ids of a prompt. `token_strs` has their spellings in the vocabulary if the request asks for them."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class DetokenizeDocument(TypedDict):
    """The text of token ids."""

    prompt: str


class TokenizerInfoDocument(TypedDict):
    """The fields of the base's `tokenizer_config.json`, with each token as a string. The server sets these fields."""

    tokenizer_class: str
    model_max_length: int
    bos_token: NotRequired[str]
    eos_token: NotRequired[str]
    pad_token: NotRequired[str]
    unk_token: NotRequired[str]
    chat_template: NotRequired[str]
