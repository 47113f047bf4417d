"""The tools that a chat request offers, and its `tool_choice`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, Field

from loramux.platform.bodies.strict_model import StrictModel
from loramux.platform.bodies.unsupported_fields import FUNCTION, Neutral

MAX_TOOLS = 1024
"""Maximum number of tools per request. OpenAI's API allows 128, but agents with several MCP servers offer more."""

NAME = r"^[a-zA-Z0-9_-]{1,64}$"
"""Pattern of a function's name, as in the OpenAI API."""

Name = Annotated[str, Field(pattern=NAME)]


NO_PARAMETERS = {"type": "object", "properties": {}, "additionalProperties": False}


def _describing_objects(schema: dict[str, Any]) -> dict[str, Any]:
    types = schema.get("type", "object")
    if types != "object" and not (isinstance(types, list) and "object" in types):
        raise ValueError('the arguments of a function form an object, so the schema\'s type must be "object"')
    return schema


Parameters = Annotated[dict[str, Any], AfterValidator(_describing_objects)]


class FunctionDefinition(StrictModel):
    NEUTRAL: ClassVar[Neutral] = FUNCTION

    name: Name
    description: str | None = None
    parameters: Parameters | None = None
    strict: bool | None = None
    cache_control: Any = Field(None, exclude=True)
    """Clients written for Anthropic add this field to functions or tools. It has no effect."""


class Tool(StrictModel):
    NEUTRAL: ClassVar[Neutral] = FUNCTION

    type: Literal["function"]
    function: FunctionDefinition
    cache_control: Any = Field(None, exclude=True)

    @property
    def name(self) -> str:
        return self.function.name

    @property
    def schema_of_arguments(self) -> dict[str, Any]:
        """The JSON schema of the arguments. Without `parameters`, a function takes no arguments.

        Arguments are objects, even if the schema also allows other values.
        """
        return {**(self.function.parameters or NO_PARAMETERS), "type": "object"}


def _different(tools: list[Tool]) -> list[Tool]:
    names = [tool.name for tool in tools]
    if len(names) > len(set(names)):
        raise ValueError("two tools have the same name")
    return tools


Tools = Annotated[list[Tool], Field(fail_fast=True, max_length=MAX_TOOLS), AfterValidator(_different)]


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """`mode` is `named` if the request names the function to call."""

    mode: Literal["none", "auto", "required", "named"]
    names: frozenset[str] | None = None
    """The functions that can be called. None means all tools."""

    @property
    def is_forced(self) -> bool:
        return self.mode in ("required", "named")


AUTO = ToolChoice("auto")


def _tool_choice(value: Any) -> ToolChoice | None:
    match value:
        case None:
            return None
        case "none" | "auto" | "required":
            return ToolChoice(value)
        case {"type": "function", "function": {"name": str(name), **more}, **others} if not more and not others:
            return ToolChoice("named", frozenset({name}))
        case {
            "type": "allowed_tools",
            "allowed_tools": {"mode": "auto" | "required" as mode, "tools": [_, *_] as tools, **more},
            **others,
        } if not more and not others and len(tools) <= MAX_TOOLS:
            return ToolChoice(mode, frozenset(map(_allowed_name, tools)))
        case _:
            raise ValueError(
                'must be "none", "auto", "required", {"type": "function", "function": {"name": ...}} or '
                '{"type": "allowed_tools", "allowed_tools": {"mode": "auto" or "required", "tools": [...]}}'
            )


def _allowed_name(tool: Any) -> str:
    match tool:
        case {"type": "function", "function": {"name": str(name), **more}, **others} if not more and not others:
            return name
        case _:
            raise ValueError('an allowed tool must be {"type": "function", "function": {"name": ...}}')


ToolChoiceField = Annotated[Any, AfterValidator(_tool_choice)]
