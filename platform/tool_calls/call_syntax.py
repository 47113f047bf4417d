"""The syntax of calls in each format, for grammars."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from loramux.platform.tool_calls.tags import GLM45, MINIMAX_M2, QWEN3_CODER, SEED_OSS, Tags


@dataclass(frozen=True, slots=True)
class Block:
    """The text around the objects of a block. `end` is a marker, which may be a special token."""

    before: str = ""
    after: str = ""
    end: str = ""


@dataclass(frozen=True, slots=True)
class CallSyntax:
    blocks: Mapping[str, Block]
    """The block after each marker of the format's parser. The marker "" stands for the start of an answer.

    Forced calls use the first block.
    """
    separator: str = ", "
    before_arguments: str = '{"name": "NAME", "arguments": '
    """The start of an object. NAME stands for the function's name, which has only letters, digits, `_` and `-`."""
    after_arguments: str = "}"
    is_grouped: bool = True
    """True if one block contains all calls. Otherwise each call has a block of its own."""
    tags: Tags | None = None
    """The tags around arguments. Grammars write JSON only where text between tags cannot follow the schema."""


def _gemma(begin: str, end: str) -> CallSyntax:
    # The arguments are JSON, because Gemma's own syntax cannot be derived from a schema.
    return CallSyntax({begin: Block(end=end)}, "", "call:NAME", "", is_grouped=False)


SYNTAXES: Mapping[str, CallSyntax] = MappingProxyType(
    {
        "functiongemma": _gemma("<start_function_call>", "<end_function_call>"),
        "gemma4": _gemma("<|tool_call>", "<tool_call|>"),
        "glm45": CallSyntax(
            {"<tool_call>": Block(end="</tool_call>")}, "\n", "NAME\n", "\n", is_grouped=False, tags=GLM45
        ),
        "hermes": CallSyntax({"<tool_call>": Block("\n", "\n", "</tool_call>")}, "\n", is_grouped=False),
        "llama3_json": CallSyntax(
            {"": Block(), "<|python_tag|>": Block()}, "; ", before_arguments='{"name": "NAME", "parameters": '
        ),
        "minimax_m2": CallSyntax(
            {"<minimax:tool_call>": Block("\n", "\n", "</minimax:tool_call>")},
            "\n",
            '<invoke name="NAME">\n',
            "\n</invoke>",
            tags=MINIMAX_M2,
        ),
        "mistral": CallSyntax({"[TOOL_CALLS]": Block("[", "]")}),
        "phi": CallSyntax({"<|tool_call|>": Block("[", "]", "<|/tool_call|>"), "functools[": Block("", "]")}),
        # The parser also reads Python calls, but only JSON objects can express every schema.
        "pythonic": CallSyntax({"": Block("[", "]"), "<|python_start|>": Block("[", "]", "<|python_end|>")}),
        "qwen3_coder": CallSyntax(
            {"<tool_call>": Block("\n<function=", "\n", "</tool_call>"), "<function=": Block()},
            "\n",
            "NAME>\n",
            "\n</function>",
            is_grouped=False,
            tags=QWEN3_CODER,
        ),
        "seed_oss": CallSyntax(
            {"<seed:tool_call>": Block("\n", "\n", "</seed:tool_call>")},
            "\n",
            "<function=NAME>\n",
            "\n</function>",
            is_grouped=False,
            tags=SEED_OSS,
        ),
    }
)
