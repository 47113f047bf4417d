"""The tools that a Messages request offers, and its `tool_choice`."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal, TypeAlias

from pydantic import AfterValidator, BeforeValidator, Discriminator, Field, Tag, model_validator

from loramux.platform.bodies.strict_model import StrictModel
from loramux.platform.bodies.tools import MAX_TOOLS, FunctionDefinition, Parameters, Tool, ToolChoice
from loramux.platform.bodies.unsupported_fields import Neutral
from loramux.platform.messages_api.blocks import MAX_SHOWN_TYPE
from loramux.platform.messages_api.client_tools import CLIENT_TOOLS

Name = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_-]{1,128}$")]
"""A tool's name, as in the Messages API."""


class MessageTool(StrictModel):
    NEUTRAL: ClassVar[Neutral] = {
        "allowed_callers": (["direct"],),
        "defer_loading": (False,),
        "input_examples": ([],),
    }

    type: Literal["custom"] | None = None
    name: Name
    description: str | None = None
    input_schema: Parameters
    strict: bool | None = None
    eager_input_streaming: bool | None = None
    """Has no effect: inputs are always streamed as they are generated."""
    cache_control: Any = None

    def chat_tool(self) -> Tool:
        function = FunctionDefinition.model_construct(
            name=self.name, description=self.description, parameters=self.input_schema, strict=self.strict
        )
        return Tool.model_construct(type="function", function=function)


class NamedClientTool(StrictModel):
    """A tool of Anthropic's that the client runs. The server adds its description and its schema."""

    NEUTRAL: ClassVar[Neutral] = MessageTool.NEUTRAL

    type: str
    name: str
    strict: bool | None = None
    max_characters: int | None = Field(None, ge=1)
    """Says after how many characters the client cuts the views of its text editor."""
    cache_control: Any = None

    @model_validator(mode="after")
    def _has_its_name(self) -> NamedClientTool:
        if self.name != CLIENT_TOOLS[self.type].name:
            raise ValueError(f"the name of {self.type} must be {CLIENT_TOOLS[self.type].name}")
        return self

    def chat_tool(self) -> Tool:
        known = CLIENT_TOOLS[self.type]
        function = FunctionDefinition.model_construct(
            name=known.name, description=known.description, parameters=dict(known.input_schema), strict=self.strict
        )
        return Tool.model_construct(type="function", function=function)


def _kind(tool: Any) -> str:
    kind = tool.get("type") if isinstance(tool, dict) else None
    return "client" if isinstance(kind, str) and kind in CLIENT_TOOLS else "custom"


def _is_no_server_tool(tool: Any) -> Any:
    kind = tool.get("type") if isinstance(tool, dict) else None
    if isinstance(kind, str) and kind != "custom" and kind not in CLIENT_TOOLS:
        raise ValueError(
            f"{kind[:MAX_SHOWN_TYPE]} is not supported: this server runs no tools itself. Describe a tool that the "
            "client runs with a name and an input_schema"
        )
    return tool


OfferedTool: TypeAlias = MessageTool | NamedClientTool
_TaggedTool: TypeAlias = Annotated[
    Annotated[MessageTool, Tag("custom")] | Annotated[NamedClientTool, Tag("client")], Discriminator(_kind)
]


def _different(tools: list[OfferedTool]) -> list[OfferedTool]:
    if len({tool.name for tool in tools}) < len(tools):
        raise ValueError("two tools have the same name")
    return tools


MessageTools = Annotated[
    list[Annotated[_TaggedTool, BeforeValidator(_is_no_server_tool, json_schema_input_type=OfferedTool)]],
    Field(fail_fast=True, max_length=MAX_TOOLS),
    AfterValidator(_different),
]


class AnyChoice(StrictModel):
    """`auto` lets the model decide, and `any` makes it call a tool."""

    type: Literal["auto", "any"]
    disable_parallel_tool_use: bool | None = None


class NoChoice(StrictModel):
    type: Literal["none"]


class NamedChoice(StrictModel):
    type: Literal["tool"]
    name: str
    disable_parallel_tool_use: bool | None = None


MessageToolChoice: TypeAlias = Annotated[AnyChoice | NoChoice | NamedChoice, Field(discriminator="type")]


def chat_choice(choice: MessageToolChoice | None) -> ToolChoice | None:
    match choice:
        case None:
            return None
        case NoChoice():
            return ToolChoice("none")
        case NamedChoice(name=name):
            return ToolChoice("named", frozenset({name}))
        case AnyChoice(type="any"):
            return ToolChoice("required")
        case AnyChoice():
            return ToolChoice("auto")


def is_parallel(choice: MessageToolChoice | None) -> bool | None:
    """Return False if the request allows only one call per answer, otherwise None."""
    return False if not isinstance(choice, NoChoice | None) and choice.disable_parallel_tool_use else None
