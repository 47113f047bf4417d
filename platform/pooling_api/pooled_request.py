"""The bodies of `/v1/embeddings`, `/classify` and `/pooling`, and what they share with those about pairs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, ClassVar, Literal, Self, TypeAlias, TypeVar

from pydantic import AfterValidator, Field

from loramux.engine.text.truncation import Truncation
from loramux.platform.bodies import unsupported_fields
from loramux.platform.bodies.chat_request import ChatRequest, Messages
from loramux.platform.bodies.prompts import listed_prompts
from loramux.platform.bodies.request_body import validated
from loramux.platform.bodies.sampling_fields import INT64, MAX_MODEL_NAME, MAX_PRIORITY
from loramux.platform.bodies.strict_model import StrictModel
from loramux.platform.bodies.unsupported_fields import Neutral
from loramux.platform.errors import InvalidRequest
from loramux.platform.pooling_api.vector_bytes import ByteOrder, NumberFormat
from loramux.platform.requests.planning import check_truncation


class PooledFields(StrictModel):
    """The fields of every body whose prompts are pooled."""

    model: str = Field(max_length=MAX_MODEL_NAME)
    user: str | None = None

    # vLLM's extensions.
    add_special_tokens: bool | None = None
    priority: int | None = Field(None, ge=-MAX_PRIORITY, le=MAX_PRIORITY)

    @property
    def stream(self) -> None:
        """The answer is never a stream."""

    @property
    def has_long_answer(self) -> bool:
        """Always True, because an answer can contain millions of numbers."""
        return True

    def shown_as(self, *, with_usage: bool, by_token_id: bool) -> Self:
        return self

    def check(self) -> None:
        """Check rules that concern several fields. Raises InvalidRequest."""

    def truncation(self, max_model_len: int) -> Truncation | None:
        """Return how longer prompts are truncated, or None if they are refused. Raises InvalidRequest."""
        return None


class PooledRequest(PooledFields):
    NEUTRAL: ClassVar[Neutral] = unsupported_fields.POOLING

    # vLLM's extensions.
    truncate_prompt_tokens: int | None = Field(None, ge=-1, lt=INT64)
    truncation_side: Literal["left", "right"] | None = None

    def truncation(self, max_model_len: int) -> Truncation | None:
        limit = self.truncate_prompt_tokens
        if limit is None:
            return None
        check_truncation(max_model_len, limit)
        # -1 stands for the length of the context.
        return Truncation(max_model_len if limit == -1 else limit, keeps_end=self.truncation_side == "left")

    def check(self) -> None:
        if self.truncate_prompt_tokens == 0:
            raise InvalidRequest("truncate_prompt_tokens must be -1 or at least 1", param="truncate_prompt_tokens")


class InputFields(PooledRequest):
    """The fields of a body with one or more prompts, as text or token ids."""

    input: Annotated[Any, AfterValidator(listed_prompts)]


class ConversationFields(PooledRequest):
    """The fields of a body with a conversation, as in vLLM. The chat template makes it a prompt."""

    messages: Messages
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    @property
    def chat(self) -> ChatRequest:
        """The chat request whose prompt is pooled."""
        return ChatRequest(
            model=self.model,
            messages=self.messages,
            add_generation_prompt=bool(self.add_generation_prompt),
            continue_final_message=self.continue_final_message,
            chat_template_kwargs=self.chat_template_kwargs,
        )

    def check(self) -> None:
        PooledRequest.check(self)
        self.chat.check()


class VectorFields(PooledRequest):
    """What a body with vectors in its answer says about them.

    `bytes` and `bytes_only` ask for vectors one after the other, not for a JSON document. With `bytes`, the header
    `metadata` describes them.
    """

    encoding_format: Literal["float", "base64", "bytes", "bytes_only"] | None = None
    dimensions: int | None = Field(None, ge=1, lt=INT64)

    # vLLM's extensions.
    normalize: bool | None = None
    use_activation: bool | None = None
    embed_dtype: NumberFormat | None = None
    endianness: ByteOrder | None = None

    def check(self) -> None:
        super().check()
        if self.is_in_digits:
            for name, neutral in (("embed_dtype", ("float32",)), ("endianness", ("native", "little"))):
                if getattr(self, name) not in (None, *neutral):
                    raise InvalidRequest(f"{name} is for the encoding formats base64, bytes and bytes_only", param=name)
        if None not in (self.normalize, self.use_activation) and self.normalize != self.use_activation:
            raise InvalidRequest("normalize and use_activation mean the same, but differ", param="use_activation")

    @property
    def is_in_digits(self) -> bool:
        """Whether the answer contains vectors as lists of numbers."""
        return self.encoding_format in (None, "float")

    @property
    def is_raw(self) -> bool:
        """Whether the answer is not a JSON document."""
        return self.encoding_format in ("bytes", "bytes_only")

    @property
    def normalizes(self) -> bool | None:
        """Whether embeddings have unit length. None leaves this to the model."""
        return self.use_activation if self.normalize is None else self.normalize


class EmbeddingRequest(VectorFields, InputFields):
    """The body of `/v1/embeddings`."""


class EmbeddingChat(VectorFields, ConversationFields):
    """The body of `/v1/embeddings` for a conversation."""


class ClassifyRequest(InputFields):
    """The body of `/classify`, as in vLLM."""

    use_activation: bool | None = None


class ClassifyChat(ConversationFields):
    """The body of `/classify` for a conversation."""

    use_activation: bool | None = None


class TaskFields(VectorFields):
    """What a body of `/pooling` asks for. Without `task`, it is what the model is for."""

    task: Literal["embed", "classify"] | None = None


class PoolingRequest(TaskFields, InputFields):
    """The body of `/pooling`, as in vLLM."""


class PoolingChat(TaskFields, ConversationFields):
    """The body of `/pooling` for a conversation."""


AnyEmbedding: TypeAlias = EmbeddingRequest | EmbeddingChat
AnyClassify: TypeAlias = ClassifyRequest | ClassifyChat
AnyPooling: TypeAlias = PoolingRequest | PoolingChat
AnyPrompts: TypeAlias = AnyEmbedding | AnyClassify | AnyPooling

P = TypeVar("P", bound=InputFields)
C = TypeVar("C", bound=ConversationFields)


def parses(prompts: type[P], conversation: type[C]) -> Callable[[dict[str, Any]], P | C]:
    """Return a function that validates a body as one of the two models. It raises InvalidRequest."""

    def parse(document: dict[str, Any]) -> P | C:
        is_conversation = document.get("messages") is not None
        return validated(document, conversation) if is_conversation else validated(document, prompts)

    return parse
