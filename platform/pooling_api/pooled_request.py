"""The bodies of `/v1/embeddings`, `/classify` and `/score`."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import AfterValidator, Field

from loramux.platform.bodies import unsupported_fields
from loramux.platform.bodies.prompts import MAX_PROMPTS, listed_prompts
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


class ClassifyRequest(PooledRequest):
    """The body of `/classify`, as in vLLM."""

    input: Annotated[Any, AfterValidator(listed_prompts)]
    use_activation: bool | None = None


def _texts(value: Any) -> Any:
    """Normalise one or more texts."""
    listed = [value] if isinstance(value, str) else value
    if not isinstance(listed, list) or not listed or not all(isinstance(text, str) for text in listed):
        raise ValueError("a text, or a list of one or more texts, is needed")
    if len(listed) > MAX_PROMPTS:
        raise ValueError(f"at most {MAX_PROMPTS} texts are allowed")
    return tuple(listed)


Texts = Annotated[Any, AfterValidator(_texts)]

SIDES = (("text_1", "text_2"), ("queries", "documents"), ("queries", "items"), ("data_1", "data_2"))
"""The names that vLLM gives the two sides of a comparison."""


class ScoreRequest(PooledRequest):
    """The body of `/score`, as in vLLM: one text and others to compare it with, or as many texts on both sides."""

    text_1: Texts | None = None
    text_2: Texts | None = None
    queries: Texts | None = None
    documents: Texts | None = None
    items: Texts | None = None
    data_1: Texts | None = None
    data_2: Texts | None = None
    use_activation: bool | None = None

    @property
    def names(self) -> tuple[str, str]:
        """The names of the two sides. Raises InvalidRequest unless the body has exactly two that belong together."""
        given = {name for sides in SIDES for name in sides if getattr(self, name) is not None}
        for first, second in SIDES:
            if given == {first, second}:
                return first, second
        raise InvalidRequest(
            "a score needs two sides: text_1 and text_2, or queries and documents",
            param=min(given, default="text_1"),
        )

    @property
    def pairs(self) -> list[tuple[str, str]]:
        first, second = (getattr(self, name) for name in self.names)
        return list(zip(first * len(second) if len(first) == 1 else first, second, strict=True))

    def check(self) -> None:
        PooledRequest.check(self)
        first, second = (getattr(self, name) for name in self.names)
        if len(first) not in (1, len(second)):
            raise InvalidRequest(
                f"{self.names[0]} has {len(first)} texts, but must have 1, or as many as {self.names[1]}, "
                f"{len(second)}",
                param=self.names[0],
            )
