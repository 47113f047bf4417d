"""Answers that must follow a JSON Schema are valid with every format of weights."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import jsonschema

from loramux.engine.llm import SamplingParams
from tests.real.findings import Finding
from tests.real.models import FORMATS, RealModel
from tests.real.texts import prompts

MAX_TOKENS = 96
GREEDY = SamplingParams(temperature=0.0)
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "intent": {"enum": ["refund", "delivery", "login", "cancel", "invoice", "bug"]},
        "priority": {"enum": ["low", "normal", "high"]},
        "order": {"type": ["integer", "null"], "minimum": 1000, "maximum": 9999},
        "words": {"type": "array", "items": {"type": "string", "maxLength": 12}, "maxItems": 3},
    },
    "required": ["intent", "priority", "order", "words"],
    "additionalProperties": False,
}


def structured(model: RealModel, num_prompts: int) -> Iterator[Finding]:
    asked = prompts(model, num_prompts)["tickets"]
    for kind in FORMATS:
        with model.open(kind) as llm:
            free = llm.generate(asked, max_tokens=MAX_TOKENS, sampling=GREEDY)
            bound = llm.generate(asked, max_tokens=MAX_TOKENS, sampling=GREEDY, schema=SCHEMA)
        complete = [one.text for one in bound if one.finish_reason == "stop"]
        num_valid = sum(map(_is_valid, complete))
        yield Finding(
            model=model.name,
            what=kind,
            figures={
                "answers": len(asked),
                "complete": len(complete),
                "valid": num_valid,
                "valid_without_schema": sum(_is_valid(one.text) for one in free),
            },
            problem=None if num_valid == len(complete) > 0 else "a complete answer is not valid",
        )


def _is_valid(text: str) -> bool:
    try:
        jsonschema.validate(json.loads(text), SCHEMA)
    except (ValueError, jsonschema.ValidationError):
        return False
    return True
