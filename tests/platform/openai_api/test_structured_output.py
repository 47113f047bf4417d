from __future__ import annotations

import json
from typing import Any

import pytest

from tests.platform.gateways import Gateway
from tests.platform.openai_api.test_bad_input import CHAT, TEXT, refused

pytestmark = pytest.mark.anyio

SCHEMA = {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}
TAG = {
    "type": "structural_tag",
    "structures": [{"begin": "<call>", "schema": SCHEMA, "end": "</call>"}],
    "triggers": ["<call>"],
}
NEW_TAG = {
    "type": "structural_tag",
    "format": {
        "type": "triggered_tags",
        "triggers": ["<call>"],
        "tags": [{"begin": "<call>", "content": {"type": "json_schema", "json_schema": SCHEMA}, "end": "</call>"}],
    },
}
FORMS: list[dict[str, Any]] = [
    {"response_format": {"type": "json_object"}},
    {"response_format": {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA, "strict": True}}},
    {"response_format": {"type": "json_schema", "json_schema": {"name": "person"}}},
    {"response_format": TAG},
    {"response_format": NEW_TAG},
    {"structured_outputs": {"json": SCHEMA}},
    {"structured_outputs": {"json": json.dumps(SCHEMA)}},
    {"structured_outputs": {"json_object": True}},
    {"structured_outputs": {"regex": "[a-z]+"}},
    {"structured_outputs": {"choice": ["yes", "no"]}},
    {"structured_outputs": {"grammar": 'start: "a"+'}},
    {"structured_outputs": {"structural_tag": TAG}},
    {"structured_outputs": {"structural_tag": json.dumps(NEW_TAG)}},
    {"guided_json": SCHEMA},
    {"guided_regex": "[a-z]+", "guided_decoding_backend": "xgrammar"},
    {"guided_choice": ["yes", "no"]},
    {"guided_grammar": 'root ::= "a"'},
    {"regex": "[a-z]+"},
    {"ebnf": 'root ::= "a"'},
    {"guided_grammar": 'root ::= "a"', "structured_outputs": {"grammar": 'root ::= "a"'}},
]
REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"response_format": {"type": "xml"}}, "invalid_value", "response_format"),
    ({"response_format": "json_object"}, "invalid_type", "response_format"),
    (
        {"response_format": {"type": "json_schema"}},
        "missing_required_parameter",
        "response_format.json_schema",
    ),
    (
        {"response_format": {"type": "json_object", "schema": SCHEMA, "value": {"type": "object"}}},
        "invalid_value",
        "response_format.value",
    ),
    *(
        ({"response_format": {"type": "json_object", name: schema}}, code, f"response_format.{name}")
        for name in ("schema", "value")
        for schema, code in (
            (True, "invalid_type"),
            ({"type": "string"}, "invalid_value"),
            ({"type": ["string", "null"]}, "invalid_value"),
        )
    ),
    ({"structured_outputs": {"yaml": "a: 1"}}, "unknown_parameter", "structured_outputs.yaml"),
    ({"structured_outputs": {"choice": []}}, "invalid_value", "structured_outputs.choice"),
    ({"structured_outputs": {"json": "{"}}, "invalid_value", "structured_outputs.json"),
    ({"structured_outputs": {"json": "5"}}, "invalid_value", "structured_outputs.json"),
    ({"guided_regex": "a", "guided_choice": ["b"]}, "invalid_value", "guided_choice"),
    ({"structured_outputs": {"regex": "a"}, "guided_regex": "b"}, "invalid_value", "guided_regex"),
    ({"guided_regex": "("}, "grammar_refused", "guided_regex"),
    ({"guided_regex": ""}, "invalid_value", "guided_regex"),
    ({"guided_grammar": ""}, "invalid_value", "guided_grammar"),
    ({"guided_json": {"type": "array", "contains": {}}}, "grammar_refused", "guided_json"),
    ({"guided_regex": "a" * 200_000}, "grammar_too_large", "guided_regex"),
    ({"response_format": {**TAG, "triggers": ["<x>"]}}, "invalid_value", "response_format.structures[0].begin"),
]


@pytest.mark.parametrize("form", FORMS, ids=lambda form: json.dumps(form)[:70])
async def test_each_form_reaches_the_engine_as_a_grammar(gateway: Gateway, form: dict[str, Any]) -> None:
    chat = {"model": "base", "messages": [{"role": "user", "content": "Hello"}], "n": 2, **form}
    answer = await gateway.http.post(CHAT, json=chat)
    assert answer.status_code == 200, answer.text
    answer = await gateway.http.post(TEXT, json={"model": "base", "prompt": "Hello", **form})
    assert answer.status_code == 200, answer.text
    assert len(gateway.engine.adds) == 3
    assert len({one.grammar for one in gateway.engine.adds}) == 1
    assert gateway.engine.adds[0].grammar


@pytest.mark.parametrize("name", ["schema", "value"])
async def test_an_object_can_have_a_schema_as_in_lorax_and_tgi(gateway: Gateway, name: str) -> None:
    chat = {"model": "base", "messages": [{"role": "user", "content": "Hello"}]}
    for wanted in (
        {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA}},
        {"type": "json_object", name: SCHEMA},
    ):
        answer = await gateway.http.post(CHAT, json={**chat, "response_format": wanted})
        assert answer.status_code == 200, answer.text
    first, second = (add.grammar for add in gateway.engine.adds)
    assert first == second


@pytest.mark.parametrize(
    ("schema", "equal"),
    [
        ({}, {"type": "object"}),
        ({"properties": {"a": {"type": "null"}}}, {"properties": {"a": {"type": "null"}}, "type": "object"}),
        ({"type": ["object", "null"]}, {"type": "object"}),
        (
            {"$defs": {"any": {}}, "$ref": "#/$defs/any"},
            {"$defs": {"any": {}}, "$ref": "#/$defs/any", "type": "object"},
        ),
    ],
    ids=["any", "no type", "several types", "a reference"],
)
async def test_an_object_is_promised_whatever_its_schema(
    gateway: Gateway, schema: dict[str, Any], equal: dict[str, Any]
) -> None:
    chat = {"model": "base", "messages": [{"role": "user", "content": "Hello"}]}
    for wanted in (
        {"type": "json_schema", "json_schema": {"name": "person", "schema": equal}},
        {"type": "json", "value": schema},
    ):
        answer = await gateway.http.post(CHAT, json={**chat, "response_format": wanted})
        assert answer.status_code == 200, answer.text
    first, second = (add.grammar for add in gateway.engine.adds)
    assert first == second


async def test_text_format_has_no_grammar(gateway: Gateway) -> None:
    chat = {"model": "base", "messages": [{"role": "user", "content": "Hello"}], "response_format": {"type": "text"}}
    assert (await gateway.http.post(CHAT, json=chat)).status_code == 200
    assert [one.grammar for one in gateway.engine.adds] == [""]


@pytest.mark.parametrize(("change", "code", "param"), REFUSED, ids=lambda value: repr(value)[:60])
async def test_invalid_forms_are_refused(gateway: Gateway, change: dict[str, Any], code: str, param: str) -> None:
    body = {"model": "base", "messages": [{"role": "user", "content": "Hello"}], **change}
    await refused(gateway, CHAT, 400, code, param, json=body)
