"""The base class of the OpenAI API's request bodies, which checks types strictly and refuses unknown fields."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, model_validator


class StrictModel(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _with_one_unknown_field(cls, document: Any) -> Any:
        # Pydantic reports each unknown field as a separate error. The first is enough to refuse the body.
        fields = cls.model_fields
        if not isinstance(document, dict) or len(document) <= len(fields):
            return document
        unknown = next(name for name in document if name not in fields)
        return {name: document[name] for name in (*fields, unknown) if name in document}
