"""Schemas of the answers to pooled requests, for the OpenAPI document."""

from __future__ import annotations

from typing import Literal, NotRequired

from typing_extensions import TypedDict


class PooledUsageDocument(TypedDict):
    """The tokens charged for the request."""

    prompt_tokens: int
    total_tokens: int


class EmbeddingDocument(TypedDict):
    """The vector of one input: numbers, or bytes in base64."""

    object: Literal["embedding"]
    index: int
    embedding: list[float] | str


class EmbeddingsDocument(TypedDict):
    """A response of `/v1/embeddings`."""

    id: str
    object: Literal["list"]
    created: int
    model: str
    data: list[EmbeddingDocument]
    usage: PooledUsageDocument


class ClassDocument(TypedDict):
    """The likeliest class of one input, and the probabilities of all, or their logits."""

    index: int
    label: str
    probs: list[float]
    num_classes: int


class ClassesDocument(TypedDict):
    """A response of `/classify`."""

    id: str
    object: Literal["list"]
    created: int
    model: str
    data: list[ClassDocument]
    usage: PooledUsageDocument


class ScoreDocument(TypedDict):
    """The score of one pair of texts."""

    index: int
    object: Literal["score"]
    score: float


class ScoresDocument(TypedDict):
    """A response of `/score`."""

    id: str
    object: Literal["list"]
    created: int
    model: str
    data: list[ScoreDocument]
    usage: PooledUsageDocument


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


class PoolingDocument(TypedDict):
    """A response of `/pooling`."""

    id: str
    object: Literal["list"]
    created: int
    model: str
    data: list[PooledDocument]
    usage: PooledUsageDocument
