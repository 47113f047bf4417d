"""The tools of a response request and its `tool_choice`, and how they appear in a conversation."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, Field

from loramux.platform.bodies.strict_model import StrictModel
from loramux.platform.bodies.tools import MAX_TOOLS, FunctionDefinition, Name, Parameters
from loramux.platform.bodies.tools import Tool as ChatTool
from loramux.platform.bodies.unsupported_fields import RESPONSES_TOOL, Neutral
from loramux.platform.errors import InvalidRequest
from loramux.platform.grammars.constraint import MAX_TEXT_BYTES
from loramux.platform.grammars.lark_pattern import UnusableLark, pattern_of_lark
from loramux.platform.requests.answers import Document

JOINT = "__"
"""Joins the names of a namespace and of a tool in it."""
MAX_LARK_GRAMMARS = 16
"""Maximum number of tools with a Lark grammar, because a short grammar can expand to a pattern of 64 KiB."""
INPUT = "input"
"""The name of a custom tool's only argument. Models call custom tools like functions."""


class FunctionTool(StrictModel):
    NEUTRAL: ClassVar[Neutral] = RESPONSES_TOOL

    type: Literal["function"]
    name: Name
    description: str | None = None
    parameters: Parameters | None = None
    strict: bool | None = None

    def as_chat_tool(self, name: str, description: str | None, place: str) -> ChatTool:
        function = FunctionDefinition.model_construct(
            name=name, description=description, parameters=self.parameters, strict=self.strict
        )
        return ChatTool.model_construct(type="function", function=function)


class TextInput(StrictModel):
    type: Literal["text"]


class GrammarInput(StrictModel):
    """The grammar of a custom tool's input: a regular expression, or a Lark grammar without recursion."""

    type: Literal["grammar"]
    syntax: Literal["lark", "regex"]
    definition: str = Field(min_length=1, max_length=MAX_TEXT_BYTES)


class ConstrainedTool(ChatTool):
    """A custom tool whose input must match a pattern.

    The model does not see the pattern, which can be much longer than the Lark grammar that it expresses.
    """

    pattern: str = Field(exclude=True)

    @property
    def schema_of_arguments(self) -> dict[str, Any]:
        schema = super().schema_of_arguments
        return {**schema, "properties": {INPUT: {**schema["properties"][INPUT], "pattern": self.pattern}}}


class CustomTool(StrictModel):
    """A tool that takes any text, or text in the form of a grammar."""

    NEUTRAL: ClassVar[Neutral] = RESPONSES_TOOL

    type: Literal["custom"]
    name: Name
    description: str | None = None
    format: Annotated[TextInput | GrammarInput, Field(discriminator="type")] | None = None

    def as_chat_tool(self, name: str, description: str | None, place: str) -> ChatTool:
        """Return a strict function with one argument. Raises InvalidRequest for an unusable grammar."""
        wanted: Document = {"type": "string"}
        if isinstance(self.format, GrammarInput):
            shown = "a regular expression" if self.format.syntax == "regex" else "a Lark grammar"
            wanted["description"] = f"Text in the form of {shown}:\n{self.format.definition}"
        parameters = {
            "type": "object",
            "properties": {INPUT: wanted},
            "required": [INPUT],
            "additionalProperties": False,
        }
        function = FunctionDefinition.model_construct(
            name=name, description=description, parameters=parameters, strict=True
        )
        if not isinstance(self.format, GrammarInput):
            return ChatTool.model_construct(type="function", function=function)
        pattern = f"^(?:{_pattern(self.format, place)})$"
        return ConstrainedTool.model_construct(type="function", function=function, pattern=pattern)


def _pattern(wanted: GrammarInput, place: str) -> str:
    if wanted.syntax == "regex":
        return wanted.definition
    try:
        return pattern_of_lark(wanted.definition)
    except UnusableLark as error:
        raise InvalidRequest(
            f"the grammar cannot be used: {error}", param=f"{place}.format.definition", code="grammar_refused"
        ) from None


class NamespaceTool(StrictModel):
    """Tools under a common name, such as `browser`. The model sees each tool under both names, joined by JOINT."""

    NEUTRAL: ClassVar[Neutral] = RESPONSES_TOOL

    type: Literal["namespace"]
    name: Name
    description: str | None = None
    tools: Annotated[
        list[Annotated[FunctionTool | CustomTool, Field(discriminator="type")]],
        Field(fail_fast=True, min_length=1, max_length=MAX_TOOLS),
    ]


Tool = Annotated[FunctionTool | CustomTool | NamespaceTool, Field(discriminator="type")]
Tools = Annotated[list[Tool], Field(fail_fast=True, max_length=MAX_TOOLS)]


@dataclass(frozen=True, slots=True)
class OfferedTool:
    """A tool that the model can call. `place` is the field of the request that defines it, such as `tools[2]`."""

    tool: FunctionTool | CustomTool
    namespace: NamespaceTool | None
    place: str

    @property
    def is_custom(self) -> bool:
        return isinstance(self.tool, CustomTool)

    @property
    def called_name(self) -> str:
        """The name by which the model calls the tool."""
        return joined_name(None if self.namespace is None else self.namespace.name, self.tool.name)

    def as_chat_tool(self) -> ChatTool:
        """Return the tool in the form of a chat request. Raises InvalidRequest for an unusable grammar."""
        description = self.tool.description
        about = None if self.namespace is None else self.namespace.description
        if about is not None:
            description = "\n\n".join([about, *filter(None, [description])])
        return self.tool.as_chat_tool(self.called_name, description, self.place)


def joined_name(namespace: str | None, name: str) -> str:
    return name if namespace is None else f"{namespace}{JOINT}{name}"


def offered_tools(tools: Sequence[FunctionTool | CustomTool | NamespaceTool]) -> list[OfferedTool]:
    """Return all tools, including those in namespaces. Raises InvalidRequest if there are too many."""
    num_tools = sum(len(tool.tools) if isinstance(tool, NamespaceTool) else 1 for tool in tools)
    if num_tools > MAX_TOOLS:
        raise InvalidRequest(
            f"tools must have at most {MAX_TOOLS} items, including the tools in namespaces",
            param="tools",
            code="invalid_value",
        )
    found = []
    for index, tool in enumerate(tools):
        place = f"tools[{index}]"
        if isinstance(tool, NamespaceTool):
            found += [OfferedTool(one, tool, f"{place}.tools[{number}]") for number, one in enumerate(tool.tools)]
        else:
            found.append(OfferedTool(tool, None, place))
    return found


def check_tools(tools: Sequence[FunctionTool | CustomTool | NamespaceTool]) -> None:
    """Raise InvalidRequest if there are too many tools, if the model would see two under the same name, or if too many
    have a Lark grammar.
    """
    offered = offered_tools(tools)
    names = Counter(one.called_name for one in offered)
    name, count = names.most_common(1)[0] if names else ("", 0)
    if count > 1:
        raise InvalidRequest(f"the model would see two tools with the name {name}", param="tools", code="invalid_value")
    formats = [one.tool.format for one in offered if isinstance(one.tool, CustomTool)]
    if sum(isinstance(one, GrammarInput) and one.syntax == "lark" for one in formats) > MAX_LARK_GRAMMARS:
        raise InvalidRequest(f"more than {MAX_LARK_GRAMMARS} tools have a Lark grammar", param="tools")


def refuse_built_in_tools(tools: Any) -> None:
    """Raise InvalidRequest for the first tool that a server would have to run, and name it."""
    for index, tool in enumerate(tools if isinstance(tools, list) else ()):
        kind = tool.get("type") if isinstance(tool, dict) else None
        if isinstance(kind, str) and kind not in ("function", "custom", "namespace"):
            raise InvalidRequest(
                f"this server does not run the built-in tool {kind[:64]!r}: offer functions or custom tools",
                param=f"tools[{index}].type",
                code="unsupported_tool",
            )


def chat_tool_choice(value: Any, offered: Sequence[OfferedTool] = ()) -> Any:
    """Return a `tool_choice` in the form of a chat request. `offered` are the request's tools. Raises ValueError."""
    match value:
        case None | "none" | "auto" | "required":
            return value
        case _ if _is_named(value):
            return _named(value, _called_names(offered))
        case {
            "type": "allowed_tools",
            "mode": "auto" | "required" as mode,
            "tools": [_, *_] as tools,
            **more,
        } if not more and len(tools) <= MAX_TOOLS and all(map(_is_named, tools)):
            names = _called_names(offered)
            named = [_named(tool, names) for tool in tools]
            return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": named}}
        case _:
            raise ValueError(
                'must be "none", "auto", "required", {"type": "function" or "custom", "name": ...} or '
                '{"type": "allowed_tools", "mode": "auto" or "required", "tools": [...]}'
            )


def _is_named(tool: Any) -> bool:
    match tool:
        case {"type": "function" | "custom", "name": str(), **more}:
            return not more or (more.keys() == {"namespace"} and isinstance(more["namespace"], str | None))
    return False


def _named(tool: Document, names: Mapping[str, str]) -> Document:
    name, namespace = tool["name"], tool.get("namespace")
    called = names.get(name, name) if namespace is None else joined_name(namespace, name)
    return {"type": "function", "function": {"name": called}}


def _called_names(offered: Sequence[OfferedTool]) -> dict[str, str]:
    """Return the name by which the model calls each tool, by the names that clients can give it: that name,
    `namespace.name`, and, if no other tool has the name, its name without the namespace.
    """
    counts = Counter(tool.tool.name for tool in offered)
    names = {tool.tool.name: tool.called_name for tool in offered if counts[tool.tool.name] == 1}
    names |= {f"{tool.namespace.name}.{tool.tool.name}": tool.called_name for tool in offered if tool.namespace}
    return names | {tool.called_name: tool.called_name for tool in offered}


def _checked(value: Any) -> Any:
    chat_tool_choice(value)
    return value


ToolChoiceField = Annotated[Any, AfterValidator(_checked)]
