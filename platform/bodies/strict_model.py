"""The base class of the OpenAI API's request bodies, which checks types strictly and refuses unknown fields."""

from __future__ import annotations

from functools import cache
from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict, model_validator

from loramux.platform.bodies.unsupported_fields import Neutral, asks_for_nothing


class StrictModel(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, allow_inf_nan=False)

    NEUTRAL: ClassVar[Neutral] = {}
    """Fields that the class does not have, with the values besides null that are dropped because they have no effect.

    If a subclass has a field of the same name, the field takes precedence.
    """

    @model_validator(mode="before")
    @classmethod
    def _without_neutral_fields(cls, document: Any) -> Any:
        fields = _names(cls)
        if not isinstance(document, dict) or document.keys() <= fields:
            return document
        document = {
            name: value
            for name, value in document.items()
            if name in fields or name not in cls.NEUTRAL or not asks_for_nothing(value, cls.NEUTRAL[name])
        }
        if len(document) <= len(fields):
            return document
        # Pydantic reports each unknown field as a separate error. The first is enough to refuse the body.
        unknown = next(name for name in document if name not in fields)
        return {name: value for name, value in document.items() if name in fields or name == unknown}


@cache
def _names(model: type[BaseModel]) -> frozenset[str]:
    """Return the names of a model's fields in JSON."""
    return frozenset(field.alias or name for name, field in model.model_fields.items())
