"""What the answers to pooled requests have in common."""

from __future__ import annotations

import base64
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np
import numpy.typing as npt

from loramux.platform.generation.choice import ChoiceDelta
from loramux.platform.generation.generation import Usage
from loramux.platform.requests.answers import Document

VectorOf = Callable[[bytes], npt.NDArray[np.float32]]
"""Makes a vector of a pooled state (see `SequenceOutput.pooled`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PooledAnswer:
    """The fields of every answer. `model` is the name that the client used."""

    request_id: str
    model: str
    created_s: int

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
class VectorsAnswer(PooledAnswer):
    """An answer with a vector of each prompt.

    `prefix` begins its id, `kind` is the `object` of each vector's document, and `field` the field with the vector.
    """

    vector_of: VectorOf
    is_base64: bool
    prefix: str = "embd"
    kind: str = "embedding"
    field: str = "embedding"

    def whole(self, deltas: Sequence[ChoiceDelta], usage: Usage) -> Document:
        data = [
            {"object": self.kind, "index": delta.index, self.field: self._shown(delta.pooled)}
            for delta in sorted(deltas, key=lambda delta: delta.index)
        ]
        return {**self.head(self.prefix), "data": data, "usage": pooled_usage(usage)}

    def _shown(self, pooled: bytes) -> str | msgspec.Raw:
        vector = self.vector_of(pooled)
        if self.is_base64:
            return base64.b64encode(vector.tobytes()).decode()
        # Encoded one by one, because Python's numbers take four times as much memory as their digits.
        return msgspec.Raw(msgspec.json.encode(vector.tolist()))


def pooled_usage(usage: Usage) -> Document:
    """Return the tokens charged: those of the prompts."""
    return {"prompt_tokens": usage.prompt_tokens, "total_tokens": usage.prompt_tokens}
