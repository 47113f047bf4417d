"""The bodies of `/v1/embeddings`, and the fields that all bodies of pooled requests share."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import AfterValidator, Field

from loramux.platform.bodies import unsupported_fields
from loramux.platform.bodies.prompts import listed_prompts
from loramux.platform.bodies.sampling_fields import INT64, MAX_MODEL_NAME, MAX_PRIORITY
from loramux.platform.bodies.strict_model import StrictModel
from loramux.platform.bodies.unsupported_fields import Neutral
from loramux.platform.errors import InvalidRequest


class PooledRequest(StrictModel):
    NEUTRAL: ClassVar[Neutral] = unsupported_fields.POOLING

    model: str = Field(max_length=MAX_MODEL_NAME)
    user: str | None = None

    # vLLM's extensions.
    truncate_prompt_tokens: int | None = Field(None, ge=-1, lt=INT64)
    truncation_side: Literal["left", "right"] | None = None
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
        if self.truncate_prompt_tokens == 0:
            raise InvalidRequest("truncate_prompt_tokens must be -1 or at least 1", param="truncate_prompt_tokens")


class EmbeddingRequest(PooledRequest):
    """The body of `/v1/embeddings`."""

    input: Annotated[Any, AfterValidator(listed_prompts)]
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = Field(None, ge=1, lt=INT64)

    # vLLM's extensions.
    normalize: bool | None = None
    use_activation: bool | None = None

    def check(self) -> None:
        PooledRequest.check(self)
        if None not in (self.normalize, self.use_activation) and self.normalize != self.use_activation:
            raise InvalidRequest("normalize and use_activation mean the same, but differ", param="use_activation")

    @property
    def normalizes(self) -> bool | None:
        """Whether embeddings have unit length. None leaves this to the model."""
        return self.use_activation if self.normalize is None else self.normalize
