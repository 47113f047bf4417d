"""Schemas of the answers to pooled requests, for the OpenAPI document."""

from __future__ import annotations

from typing import Literal, NotRequired, TypeAlias

from typing_extensions import TypedDict

_Vector: TypeAlias = list[float]


class PooledUsageDocument(TypedDict):
    """The tokens charged for the request."""

    prompt_tokens: int
    total_tokens: int


class _Answer(TypedDict):
    id: str
    object: Literal["list"]
    created: int
    model: str
    usage: PooledUsageDocument


class EmbeddingDocument(TypedDict):
    """The vector of one input: numbers, or bytes in base64."""

    object: Literal["embedding"]
    index: int
    embedding: list[float] | str


class EmbeddingsDocument(_Answer):
    """A response of `/v1/embeddings`."""

    data: list[EmbeddingDocument]


class _ApiVersionDocument(TypedDict):
    version: Literal["1", "2"]


class _BilledUnitsDocument(TypedDict):
    input_tokens: int


class EmbedMetaDocument(TypedDict):
    """The version of Cohere's API, and the tokens charged for the request."""

    api_version: _ApiVersionDocument
    billed_units: _BilledUnitsDocument


class _Embed(TypedDict):
    id: str
    texts: list[str]
    meta: EmbedMetaDocument


class EmbedDocument(_Embed):
    """A response of `/v1/embed` to a request without `embedding_types`."""

    response_type: Literal["embeddings_floats"]
    embeddings: list[_Vector]


class _VectorsByType(TypedDict):
    float: NotRequired[list[_Vector]]
    base64: NotRequired[list[str]]


class TypedEmbedDocument(_Embed):
    """A response of `/v2/embed`, or of `/v1/embed` to a request with `embedding_types`."""

    response_type: Literal["embeddings_by_type"]
    embeddings: _VectorsByType


class ClassDocument(TypedDict):
    """The likeliest class of one input, and the probabilities of all, or their logits."""

    index: int
    label: str
    probs: list[float]
    num_classes: int


class ClassesDocument(_Answer):
    """A response of `/classify`."""

    data: list[ClassDocument]


class ScoreDocument(TypedDict):
    """The score of one pair of texts."""

    index: int
    object: Literal["score"]
    score: float


class ScoresDocument(_Answer):
    """A response of `/score`."""

    data: list[ScoreDocument]


class RankedTextDocument(TypedDict):
    """A document of the request."""

    text: str


class RankedDocument(TypedDict):
    """The place of one document in the request, and its score. `document` is absent with `return_documents: false`."""

    index: int
    document: NotRequired[RankedTextDocument]
    relevance_score: float


class RankingDocument(TypedDict):
    """A response of `/rerank`."""

    id: str
    model: str
    usage: PooledUsageDocument
    results: list[RankedDocument]


class PooledDocument(TypedDict):
    """The vector, or the classes' probabilities, of one input: numbers, or bytes in base64."""

    index: int
    object: Literal["pooling"]
    data: list[float] | str


class PoolingDocument(_Answer):
    """A response of `/pooling`."""

    data: list[PooledDocument]
