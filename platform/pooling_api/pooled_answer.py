"""What the answers to pooled requests have in common."""

from __future__ import annotations

import base64
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

import msgspec
import numpy as np
import numpy.typing as npt

from loramux.platform.errors import InvalidRequest
from loramux.platform.generation.choice import ChoiceDelta
from loramux.platform.generation.generation import Usage
from loramux.platform.pooling_api.pooled_request import AnyEmbedding, AnyPooling
from loramux.platform.pooling_api.vector_bytes import ByteOrder, NumberFormat, vector_bytes
from loramux.platform.requests.answers import Document, RawBody
from loramux.platform.requests.endpoint import Received

METADATA = "metadata"
"""The header that describes vectors as bytes, as in vLLM."""

MAX_DESCRIBED = 512
"""Maximum number of vectors that the header describes. Python's HTTP client refuses a header of 65,536 bytes."""

VectorOf = Callable[[bytes], npt.NDArray[np.float32]]
"""Makes a vector of a pooled state (see `SequenceOutput.pooled`)."""


@dataclass(frozen=True, slots=True)
class Binary:
    """How vectors become bytes."""

    number_format: NumberFormat
    byte_order: ByteOrder

    def encoded(self, vector: npt.NDArray[np.float32]) -> bytes:
        return vector_bytes(vector, self.number_format, self.byte_order)

    def in_base64(self, vector: npt.NDArray[np.float32]) -> str:
        return base64.b64encode(self.encoded(vector)).decode()


def in_digits(vector: npt.NDArray[np.float32]) -> msgspec.Raw:
    """Return a vector as a list of numbers in JSON, because Python's numbers take four times as much memory."""
    return msgspec.Raw(msgspec.json.encode(vector.tolist()))


@dataclass(frozen=True, slots=True, kw_only=True)
class PooledAnswer:
    """The fields of every answer. `model` is the name that the client used."""

    request_id: str
    model: str
    created_s: int = field(default_factory=lambda: int(time.time()))

    def identifier(self, prefix: str) -> str:
        return f"{prefix}-{self.request_id.removeprefix('req_')}"

    def head(self, prefix: str) -> Document:
        """Return the first fields of the body. `prefix` begins its id."""
        return {
            "id": self.identifier(prefix),
            "object": "list",
            "created": self.created_s,
            "model": self.model,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class VectorForm:
    """How an answer with vectors names them.

    `prefix` begins its id, `kind` is the `object` of each vector's document, and `field` the field with the vector.
    """

    prefix: str
    kind: str
    field: str


@dataclass(frozen=True, slots=True, kw_only=True)
class VectorsAnswer(PooledAnswer):
    """A document with a vector of each prompt, as a list of numbers, or in base64 as `binary` says."""

    vector_of: VectorOf
    form: VectorForm
    binary: Binary | None

    def whole(self, deltas: Sequence[ChoiceDelta], usage: Usage) -> Document:
        form = self.form
        data = [
            {"object": form.kind, "index": delta.index, form.field: self._shown(delta.pooled)}
            for delta in in_order(deltas)
        ]
        return {**self.head(form.prefix), "data": data, "usage": pooled_usage(usage)}

    def _shown(self, pooled: bytes) -> str | msgspec.Raw:
        vector = self.vector_of(pooled)
        return in_digits(vector) if self.binary is None else self.binary.in_base64(vector)


@dataclass(frozen=True, slots=True, kw_only=True)
class RawVectorsAnswer(PooledAnswer):
    """The bytes of a vector of each prompt, one after the other.

    If `is_described`, the header `metadata` contains the rest of the document, and where each vector is.
    """

    vector_of: VectorOf
    form: VectorForm
    binary: Binary
    is_described: bool

    def raw(self, deltas: Sequence[ChoiceDelta], usage: Usage) -> RawBody:
        vectors = [self.vector_of(delta.pooled) for delta in in_order(deltas)]
        encoded = [self.binary.encoded(vector) for vector in vectors]
        content = b"".join(encoded)
        if not self.is_described:
            return RawBody(content, {})
        ends = list(accumulate(map(len, encoded)))
        data = [
            {
                "index": index,
                "embed_dtype": self.binary.number_format,
                "endianness": self.binary.byte_order,
                "start": end - len(encoded[index]),
                "end": end,
                "shape": list(vectors[index].shape),
            }
            for index, end in enumerate(ends)
        ]
        metadata = {**self.head(self.form.prefix), "data": data, "usage": pooled_usage(usage)}
        del metadata["object"]
        return RawBody(content, {METADATA: json.dumps(metadata, separators=(",", ":"))})


def vectors_answer(
    received: Received[AnyEmbedding | AnyPooling], num_vectors: int, vector_of: VectorOf, form: VectorForm
) -> VectorsAnswer | RawVectorsAnswer:
    """Return what builds the answer in the encoding that the body asks for. Raises InvalidRequest."""
    body, binary = received.body, None
    if not body.is_in_digits:
        binary = Binary(body.embed_dtype or "float32", body.endianness or "little")
    is_described = body.encoding_format == "bytes"
    if is_described and num_vectors > MAX_DESCRIBED:
        raise InvalidRequest(
            f"a header can describe {MAX_DESCRIBED} vectors, but the answer would have {num_vectors}: use bytes_only",
            param="encoding_format",
        )
    if binary is not None and body.is_raw:
        return RawVectorsAnswer(
            request_id=received.request_id,
            model=body.model,
            vector_of=vector_of,
            form=form,
            binary=binary,
            is_described=is_described,
        )
    return VectorsAnswer(
        request_id=received.request_id,
        model=body.model,
        vector_of=vector_of,
        form=form,
        binary=binary,
    )


def in_order(deltas: Sequence[ChoiceDelta]) -> list[ChoiceDelta]:
    return sorted(deltas, key=lambda delta: delta.index)


def pooled_usage(usage: Usage) -> Document:
    """Return the tokens charged: those of the prompts."""
    return {"prompt_tokens": usage.prompt_tokens, "total_tokens": usage.prompt_tokens}
