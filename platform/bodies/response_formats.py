"""The request fields that constrain the answer: OpenAI's `response_format`, and vLLM's extensions."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, Field

from loramux.adapter_store.formats.files.strict_json import InvalidJson, parse_strict_json
from loramux.platform.bodies.strict_model import StrictModel
from loramux.platform.bodies.structural_tags import (
    ANY_OBJECT,
    ParsedStructuralTag,
    Schema,
    StructuralTag,
    structural_tag_constraint,
)
from loramux.platform.bodies.unsupported_fields import RESPONSE_FORMAT, STRUCTURED_OUTPUTS, Neutral
from loramux.platform.errors import InvalidRequest
from loramux.platform.grammars.constraint import MAX_CHOICES, Constraint

Choices = Annotated[
    list[Annotated[str, Field(min_length=1)]], Field(fail_fast=True, min_length=1, max_length=MAX_CHOICES)
]


class JsonSchema(StrictModel):
    """`strict` changes nothing, because answers always follow the schema."""

    name: str = Field(min_length=1, max_length=64)
    description: str | None = None
    schema_: Schema | None = Field(None, alias="schema")
    strict: bool | None = None


class TextFormat(StrictModel):
    NEUTRAL: ClassVar[Neutral] = RESPONSE_FORMAT

    type: Literal["text"]


def _of_objects(schema: dict[str, Any]) -> dict[str, Any]:
    """Return the schema of the objects that satisfy `schema`. Raises ValueError if it allows none."""
    kinds = schema.get("type", "object")
    if kinds != "object" and not (isinstance(kinds, list) and "object" in kinds):
        raise ValueError("the type of the schema must be object")
    return {**schema, "type": "object"}


ObjectSchema = Annotated[dict[str, Any], AfterValidator(_of_objects)]


class JsonObjectFormat(StrictModel):
    """An object, which follows a schema if it has one, as in LoRAX and llama.cpp (`schema`) or in TGI and its client,
    `huggingface_hub` (`value`), which both also call the type `json`.
    """

    NEUTRAL: ClassVar[Neutral] = RESPONSE_FORMAT

    type: Literal["json_object", "json"]
    schema_: ObjectSchema | None = Field(None, alias="schema")
    value: ObjectSchema | None = None


class JsonSchemaFormat(StrictModel):
    type: Literal["json_schema"]
    json_schema: JsonSchema


ResponseFormat = Annotated[
    TextFormat | JsonObjectFormat | JsonSchemaFormat | StructuralTag, Field(discriminator="type")
]


class StructuredOutputs(StrictModel):
    """vLLM's `structured_outputs`. A body can set at most one constraint."""

    NEUTRAL: ClassVar[Neutral] = STRUCTURED_OUTPUTS

    json_: Schema | str | None = Field(None, alias="json")
    json_object: bool | None = None
    regex: str | None = Field(None, min_length=1)
    choice: Choices | None = None
    grammar: str | None = Field(None, min_length=1)
    structural_tag: ParsedStructuralTag | None = None


def constraints(
    response_format: ResponseFormat | None, structured: StructuredOutputs | None, guided: StructuredOutputs
) -> Iterator[Constraint]:
    match response_format:
        case JsonObjectFormat(schema_=None, value=None):
            yield Constraint.of_json("json_schema", ANY_OBJECT, "response_format")
        case JsonObjectFormat(schema_=schema, value=value):
            if schema is not None:
                yield Constraint.of_json("json_schema", schema, "response_format.schema")
            if value is not None:
                yield Constraint.of_json("json_schema", value, "response_format.value")
        case JsonSchemaFormat(json_schema=wanted):
            named = ANY_OBJECT if wanted.schema_ is None else wanted.schema_
            yield Constraint.of_json("json_schema", named, "response_format.json_schema.schema")
        case StructuralTag():
            yield structural_tag_constraint(response_format, "response_format")
    if structured is not None:
        yield from _structured(structured, "structured_outputs.")
    yield from _structured(guided, "guided_")


def _structured(wanted: StructuredOutputs, prefix: str) -> Iterator[Constraint]:
    if wanted.json_ is not None:
        yield schema_constraint(wanted.json_, f"{prefix}json")
    if wanted.json_object:
        yield Constraint.of_json("json_schema", ANY_OBJECT, f"{prefix}json_object")
    if wanted.regex is not None:
        yield Constraint.of_text("regex", wanted.regex, f"{prefix}regex")
    if wanted.choice is not None:
        yield Constraint.of_json("choice", wanted.choice, f"{prefix}choice")
    if wanted.grammar is not None:
        yield Constraint.of_text("grammar", wanted.grammar, f"{prefix}grammar")
    if wanted.structural_tag is not None:
        yield structural_tag_constraint(wanted.structural_tag, f"{prefix}structural_tag")


def schema_constraint(schema: Schema | str, param: str) -> Constraint:
    """Return the constraint for a schema, which can be an object or, as in vLLM, a string of JSON."""
    if isinstance(schema, str):
        try:
            schema = parse_strict_json(schema.encode())
        except InvalidJson as error:
            raise InvalidRequest(f"the schema is not valid JSON: {error}", param=param) from None
        if not isinstance(schema, (dict, bool)):
            raise InvalidRequest("a schema must be an object, true or false", param=param)
    return Constraint.of_json("json_schema", schema, param)
