"""Structural tags: answers in which text alternates with parts in a fixed format, in the form of XGrammar and vLLM.

See https://xgrammar.mlc.ai/docs/tutorials/structural_tag.html. Formats that refer to single tokens, and schemas in a
style other than JSON, are not supported.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, ValidationError

from loramux.adapter_store.formats.files.strict_json import InvalidJson, parse_strict_json
from loramux.platform.bodies.strict_model import StrictModel
from loramux.platform.errors import InvalidRequest
from loramux.platform.grammars.constraint import Constraint

MAX_PARTS = 64
"""Maximum number of tags, triggers, excluded strings or elements in one list."""

MAX_REPEATS = 1024

Schema = dict[str, Any] | bool
NonEmpty = Annotated[str, Field(min_length=1)]
Strings = Annotated[list[NonEmpty], Field(fail_fast=True, min_length=1, max_length=MAX_PARTS)]
Excluded = Annotated[list[NonEmpty], Field(fail_fast=True, max_length=MAX_PARTS)]

ANY_OBJECT: Schema = {"type": "object"}


class ConstString(StrictModel):
    type: Literal["const_string"]
    value: str


class JsonSchemaContent(StrictModel):
    type: Literal["json_schema"]
    json_schema: Schema
    style: Literal["json"] = "json"
    any_order: Literal[False] = False


class AnyText(StrictModel):
    type: Literal["any_text"]
    excludes: Excluded | None = None
    max_chars: int | None = Field(None, ge=0, le=MAX_REPEATS)


class GrammarContent(StrictModel):
    type: Literal["grammar"]
    grammar: NonEmpty


class RegexContent(StrictModel):
    type: Literal["regex"]
    pattern: NonEmpty


class SequenceOfFormats(StrictModel):
    type: Literal["sequence"]
    elements: Formats


class OneOfFormats(StrictModel):
    type: Literal["or"]
    elements: Formats


class OptionalFormat(StrictModel):
    type: Literal["optional", "plus", "star"]
    content: Format


class Repeated(StrictModel):
    """`max` is -1 if the number of repetitions has no upper limit."""

    type: Literal["repeat"]
    min: int = Field(ge=0, le=MAX_REPEATS)
    max: int = Field(ge=-1, le=MAX_REPEATS)
    content: Format


class Tag(StrictModel):
    type: Literal["tag"] = "tag"
    begin: str
    content: Format
    end: str | Annotated[list[str], Field(fail_fast=True, min_length=1, max_length=MAX_PARTS)]


class TriggeredTags(StrictModel):
    """After a trigger, the answer follows a tag that begins with the trigger."""

    type: Literal["triggered_tags"]
    triggers: Strings
    tags: Tags
    at_least_one: bool = False
    stop_after_first: bool = False
    excludes: Excluded | None = None


class TagsWithSeparator(StrictModel):
    type: Literal["tags_with_separator"]
    tags: Tags
    separator: str
    at_least_one: bool = False
    stop_after_first: bool = False


Format = Annotated[
    ConstString
    | JsonSchemaContent
    | AnyText
    | GrammarContent
    | RegexContent
    | SequenceOfFormats
    | OneOfFormats
    | OptionalFormat
    | Repeated
    | Tag
    | TriggeredTags
    | TagsWithSeparator,
    Field(discriminator="type"),
]
Formats = Annotated[list[Format], Field(fail_fast=True, min_length=1, max_length=MAX_PARTS)]
Tags = Annotated[list[Tag], Field(fail_fast=True, min_length=1, max_length=MAX_PARTS)]


class Structure(StrictModel):
    begin: NonEmpty
    schema_: Schema = Field(ANY_OBJECT, alias="schema")
    end: str = ""


class StructuralTag(StrictModel):
    """The answer's `format`, or the older form: after a trigger, the answer follows the structure that begins with the
    trigger.
    """

    type: Literal["structural_tag"]
    format: Format | None = None
    structures: Annotated[list[Structure], Field(fail_fast=True, min_length=1, max_length=MAX_PARTS)] | None = None
    triggers: Strings | None = None


def _parsed(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    try:
        return StructuralTag.model_validate(parse_strict_json(value.encode()))
    except InvalidJson as error:
        raise ValueError(f"the structural tag is not valid JSON: {error}") from None
    except ValidationError as error:
        # These places are not paths of the request, so the message names them.
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        raise ValueError(f"{'.'.join(map(str, first['loc']))}: {first['msg']}") from None


ParsedStructuralTag = Annotated[StructuralTag, BeforeValidator(_parsed)]
"""A structural tag that can also be a string of JSON, as in vLLM."""


def structural_tag_constraint(tag: StructuralTag, param: str) -> Constraint:
    """Return the constraint for a structural tag in either form. Raises InvalidRequest."""
    if tag.format is not None:
        if tag.structures is not None or tag.triggers is not None:
            raise InvalidRequest("format and structures exclude each other", param=f"{param}.structures")
        wanted = tag.format.model_dump()
    else:
        for name in ("structures", "triggers"):
            if getattr(tag, name) is None:
                raise InvalidRequest(
                    f"a structural tag needs format, or {name}",
                    param=f"{param}.{name}",
                    code="missing_required_parameter",
                )
        wanted = _in_new_form(tag, param)
    return Constraint.of_json("structural_tag", wanted, param)


def _in_new_form(tag: StructuralTag, param: str) -> dict[str, Any]:
    assert tag.structures is not None
    assert tag.triggers is not None
    for index, one in enumerate(tag.structures):
        if not any(one.begin.startswith(trigger) for trigger in tag.triggers):
            raise InvalidRequest(
                "a structure must begin with one of the triggers", param=f"{param}.structures[{index}].begin"
            )
    tags = [
        {"begin": one.begin, "content": {"type": "json_schema", "json_schema": one.schema_}, "end": one.end}
        for one in tag.structures
    ]
    return {"type": "triggered_tags", "triggers": tag.triggers, "tags": tags}
