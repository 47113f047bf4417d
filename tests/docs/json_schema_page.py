from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from loramux.engine.constraints.constraint_grammar import GrammarRefused
from loramux.platform.grammars.check import checked_grammar
from loramux.platform.grammars.constraint import MAX_CHOICES, MAX_TEXT_BYTES
from tests.engine.byte_vocabulary import byte_vocabulary

HEAD = f"""# JSON Schema in structured output

`make docs` generates this page: it checks each example below as the server checks the schema of a request. A test
ensures that the page is current. [Writing a client](clients.md#structured-output) shows how to send a schema. A schema
that the server does not support is refused with 400 `grammar_refused`, and the message names the keyword.

A schema, a regex, a grammar or a list of choices has at most {MAX_TEXT_BYTES // 1024} KiB. A list of choices has at
most {MAX_CHOICES:,} entries. The schemas of tools that must be followed count together with that of the response
format, without their titles and descriptions.

"""

NULL, TEXT, WHOLE = {"type": "null"}, {"type": "string"}, {"type": "integer"}

EXAMPLES: dict[str, list[tuple[str, Any]]] = {
    "Any value": [
        ("type", {"type": ["integer", "null"]}),
        ("enum", {"enum": ["red", "green"]}),
        ("const", {"const": 3}),
        ("anyOf", {"anyOf": [TEXT, WHOLE]}),
        ("oneOf, alternatives that exclude each other", {"oneOf": [TEXT, WHOLE]}),
        ("oneOf, alternatives that overlap", {"oneOf": [WHOLE, {"minimum": 2}]}),
        ("allOf", {"allOf": [WHOLE, {"minimum": 2}]}),
        ("not", {"not": TEXT}),
        ("if", {"if": TEXT, "then": {"minLength": 1}}),
        ("$ref within the schema", {"$ref": "#/$defs/a", "$defs": {"a": TEXT}}),
        ("$ref to itself", {"type": "array", "items": {"$ref": "#"}}),
        ("$ref to another document", {"$ref": "https://example.com/schema"}),
        ("$dynamicRef", {"$dynamicRef": "#a", "$defs": {"a": {"$dynamicAnchor": "a"}}}),
        ("$anchor", {"$ref": "#a", "$defs": {"a": {"$anchor": "a"}}}),
        ("$id below the root", {"items": {"$id": "https://example.com/item"}}),
        ("title, description, default, examples", {"title": "a", "description": "b", "default": 1, "examples": [2]}),
    ],
    "Strings": [
        ("minLength, maxLength", {"type": "string", "minLength": 1, "maxLength": 9}),
        ("pattern", {"type": "string", "pattern": "^[a-z]+$"}),
        ("pattern with maxLength", {"type": "string", "pattern": "^[a-z]+$", "maxLength": 9}),
        ("contentEncoding, contentMediaType", {"contentEncoding": "base64", "contentMediaType": "image/png"}),
        *(
            (f"format: {name}", {"type": "string", "format": name})
            for name in (
                *("date-time", "date", "time", "duration", "email", "hostname", "ipv4", "ipv6", "uri", "uuid"),
                *("idn-email", "iri", "json-pointer", "regex", "uri-reference"),
            )
        ),
    ],
    "Numbers": [
        ("minimum, maximum", {"type": "number", "minimum": 0, "maximum": 1}),
        ("exclusiveMinimum, exclusiveMaximum", {"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1}),
        ("multipleOf", {"type": "integer", "multipleOf": 5}),
    ],
    "Objects": [
        ("properties, required", {"type": "object", "properties": {"a": TEXT}, "required": ["a"]}),
        ("additionalProperties", {"type": "object", "additionalProperties": WHOLE}),
        ("patternProperties", {"type": "object", "patternProperties": {"^a": NULL}, "additionalProperties": False}),
        ("propertyNames", {"type": "object", "propertyNames": {"maxLength": 3}}),
        ("minProperties", {"type": "object", "minProperties": 1}),
        ("maxProperties", {"type": "object", "maxProperties": 2}),
        ("dependentRequired", {"type": "object", "dependentRequired": {"a": ["b"]}}),
        ("dependentSchemas", {"type": "object", "dependentSchemas": {"a": {"required": ["b"]}}}),
        ("dependencies", {"type": "object", "dependencies": {"a": ["b"]}}),
        ("unevaluatedProperties", {"type": "object", "unevaluatedProperties": False}),
    ],
    "Arrays": [
        ("items", {"type": "array", "items": TEXT}),
        ("prefixItems", {"type": "array", "prefixItems": [TEXT, WHOLE]}),
        ("items as a list, additionalItems", {"type": "array", "items": [TEXT], "additionalItems": WHOLE}),
        ("minItems, maxItems", {"type": "array", "items": WHOLE, "minItems": 1, "maxItems": 3}),
        ("contains", {"type": "array", "contains": TEXT}),
        ("uniqueItems", {"type": "array", "uniqueItems": True}),
        ("unevaluatedItems", {"type": "array", "unevaluatedItems": False}),
    ],
}


def json_schema_page() -> str:
    return HEAD + "\n".join(_lines())


def _lines() -> Iterator[str]:
    for title, examples in EXAMPLES.items():
        yield from (f"## {title}", "", "| keyword | example | supported |", "|---|---|---|")
        for name, schema in examples:
            yield f"| {name} | `{json.dumps(schema)}` | {'yes' if is_accepted(schema) else 'no'} |"
        yield ""


def is_accepted(schema: Any) -> bool:
    try:
        checked_grammar("json_schema", json.dumps(schema), byte_vocabulary())
    except GrammarRefused:
        return False
    return True
