"""The bodies of `/score` and `/rerank`: pairs of texts."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

from pydantic import AfterValidator, Field

from loramux.platform.bodies import unsupported_fields
from loramux.platform.bodies.prompts import MAX_PROMPTS
from loramux.platform.bodies.sampling_fields import INT64
from loramux.platform.bodies.unsupported_fields import Neutral
from loramux.platform.errors import InvalidRequest
from loramux.platform.pooling_api.pooled_request import PooledRequest


def _texts(value: Any) -> Any:
    """Normalise one or more texts."""
    listed = [value] if isinstance(value, str) else value
    if not isinstance(listed, list) or not listed or not all(isinstance(text, str) for text in listed):
        raise ValueError("a text, or a list of one or more texts, is needed")
    if len(listed) > MAX_PROMPTS:
        raise ValueError(f"at most {MAX_PROMPTS} texts are allowed")
    return tuple(listed)


def _text(value: Any) -> Any:
    """Return the text of a query or document, which Jina's and Cohere's clients can send as an object."""
    if isinstance(value, dict) and value.keys() == {"text"}:
        value = value["text"]
    if not isinstance(value, str):
        raise ValueError('a text, or an object {"text": ...}, is needed')
    return value


def _documents(value: Any) -> Any:
    return _texts([_text(one) for one in value] if isinstance(value, list) else _text(value))


Text = Annotated[Any, AfterValidator(_text)]
Texts = Annotated[Any, AfterValidator(_texts)]
Documents = Annotated[Any, AfterValidator(_documents)]


class PairRequest(PooledRequest):
    """The fields of a body about pairs of texts. A limit of 0 means none."""

    NEUTRAL: ClassVar[Neutral] = unsupported_fields.PAIRS

    use_activation: bool | None = None
    max_tokens_per_query: int | None = Field(None, ge=0, lt=INT64)
    max_tokens_per_doc: int | None = Field(None, ge=0, lt=INT64)

    @property
    def names(self) -> tuple[str, str]:
        """The names of the fields with the two sides. Raises InvalidRequest unless the body has two that belong
        together.
        """
        raise NotImplementedError

    @property
    def pairs(self) -> list[tuple[str, str]]:
        """The pairs of texts."""
        raise NotImplementedError


SIDES = (("text_1", "text_2"), ("queries", "documents"), ("queries", "items"), ("data_1", "data_2"))
"""The names that vLLM gives the two sides of a comparison."""


class ScoreRequest(PairRequest):
    """The body of `/score`, as in vLLM: one text and others to compare it with, or as many texts on both sides."""

    text_1: Texts | None = None
    text_2: Texts | None = None
    queries: Texts | None = None
    documents: Texts | None = None
    items: Texts | None = None
    data_1: Texts | None = None
    data_2: Texts | None = None

    @property
    def names(self) -> tuple[str, str]:
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
        PairRequest.check(self)
        first, second = (getattr(self, name) for name in self.names)
        if len(first) not in (1, len(second)):
            raise InvalidRequest(
                f"{self.names[0]} has {len(first)} texts, but must have 1, or as many as {self.names[1]}, "
                f"{len(second)}",
                param=self.names[0],
            )


class RerankRequest(PairRequest):
    """The body of `/rerank`, as in vLLM, Jina and Cohere: a query, and documents to order by their relevance to it.

    `top_n` limits the number of results; 0 means no limit.
    """

    query: Text
    documents: Documents
    top_n: int | None = Field(None, ge=0, lt=INT64)
    return_documents: bool | None = None

    @property
    def names(self) -> tuple[str, str]:
        return "query", "documents"

    @property
    def pairs(self) -> list[tuple[str, str]]:
        return [(self.query, document) for document in self.documents]
