from __future__ import annotations

import json

from loramux.engine.constraints.constraint_grammar import constraint_grammar

ORDER = {
    "type": "object",
    "properties": {
        "customer_name": {"type": "string", "maxLength": 6},
        "payment_method": {"enum": ["credit card", "credit note", "bank transfer"]},
        "is_delivered": {"type": "boolean"},
    },
    "required": ["customer_name", "payment_method", "is_delivered"],
    "additionalProperties": False,
}
CHOICES = ["the first of several long answers", "the second of several long answers", "the third"]
CALL = 'start: "<call>{\\"name\\": \\"get_weather\\", \\"arguments\\": " place "}</call>"\nplace: %json ' + json.dumps(
    {"type": "object", "properties": {"city": {"enum": ["Oslo", "Rome"]}}, "required": ["city"]}
    | {"additionalProperties": False, "x-guidance": {"whitespace_flexible": False}}
)

FORCING: dict[str, str] = {
    "schema": constraint_grammar("json_schema", json.dumps(ORDER)),
    "choice": constraint_grammar("choice", json.dumps(CHOICES)),
    "regex": constraint_grammar("regex", "The answer is (yes|no), because [a-z]{3,6} says so\\."),
    "one text": constraint_grammar("regex", "There is nothing to choose in this answer\\."),
    "call": constraint_grammar("grammar", CALL),
}
"""Grammars that allow only one token in many places."""
