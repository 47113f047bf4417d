from __future__ import annotations

from typing import Any

import jsonschema
import pytest
from pydantic import ValidationError

from loramux.platform.bodies.conversation import ChatMessage


@pytest.mark.parametrize("field", ["text", "refusal"])
@pytest.mark.parametrize("kind", ["text", "input_text", "output_text", "refusal"])
def test_the_schema_names_the_field_that_each_type_of_part_needs(kind: str, field: str) -> None:
    message = {"role": "assistant", "content": [{"type": kind, field: "No."}]}
    assert _is_valid(message) == (field == ("refusal" if kind == "refusal" else "text"))
    schema = ChatMessage.model_json_schema()
    assert jsonschema.Draft202012Validator(schema).is_valid(message) == _is_valid(message)


def _is_valid(message: dict[str, Any]) -> bool:
    try:
        ChatMessage.model_validate(message)
    except ValidationError:
        return False
    return True
