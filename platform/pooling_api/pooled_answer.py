"""What the answers to all pooled requests have in common."""

from __future__ import annotations

from dataclasses import dataclass

from loramux.platform.generation.generation import Usage
from loramux.platform.requests.answers import Document


@dataclass(frozen=True, slots=True, kw_only=True)
class PooledAnswer:
    """The fields of every answer. `model` is the name that the client used."""

    request_id: str
    model: str
    created_s: int

    def head(self, prefix: str) -> Document:
        """Return the first fields of the body. `prefix` begins its id."""
        identifier = f"{prefix}-{self.request_id.removeprefix('req_')}"
        return {"id": identifier, "object": "list", "created": self.created_s, "model": self.model}


def pooled_usage(usage: Usage) -> Document:
    """Return the tokens charged: those of the prompts."""
    return {"prompt_tokens": usage.prompt_tokens, "total_tokens": usage.prompt_tokens}
