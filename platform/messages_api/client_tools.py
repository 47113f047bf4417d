"""Anthropic's tools that the client runs: the shell, the text editor and the memory.

A request names only the type of such a tool, because Anthropic's models know it. Other models are told its name, its
purpose and its schema, like those of a custom tool
(https://platform.claude.com/docs/en/agents-and-tools/tool-use/overview).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

Schema: TypeAlias = Mapping[str, Any]
TEXT: Schema = {"type": "string"}
LINE: Schema = {"type": "integer", "minimum": 0}
LINES: Schema = {"type": "array", "items": {"type": "integer"}, "minItems": 2, "maxItems": 2}
EDITS: Mapping[str, Mapping[str, Schema]] = {
    "view": {"path": TEXT, "view_range": LINES},
    "create": {"path": TEXT, "file_text": TEXT},
    "str_replace": {"path": TEXT, "old_str": TEXT, "new_str": TEXT},
    "insert": {"path": TEXT, "insert_line": LINE, "insert_text": TEXT},
}
"""The commands of the text editor, with their arguments."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientTool:
    name: str
    description: str
    input_schema: Schema


def _commands(arguments: Mapping[str, Mapping[str, Schema]]) -> Schema:
    """Return the schema of a tool whose argument `command` decides which others it has."""
    properties = {name: schema for command in arguments.values() for name, schema in command.items()}
    command = {"type": "string", "enum": list(arguments)}
    return {"type": "object", "properties": {"command": command, **properties}, "required": ["command"]}


BASH = ClientTool(
    name="bash",
    description="Runs a command in a persistent bash session and returns its output. `restart` restarts the session.",
    input_schema={"type": "object", "properties": {"command": TEXT, "restart": {"type": "boolean"}}},
)
_EDITOR = (
    "Views and edits files. `view` shows a file, with line numbers, or lists a folder; `view_range` limits it to the "
    "lines from the first number to the second, -1 for the last line. `create` writes a file. `str_replace` replaces "
    "the only occurrence of `old_str`. `insert` inserts a text after the line `insert_line`."
)
EDITOR = ClientTool(name="str_replace_based_edit_tool", description=_EDITOR, input_schema=_commands(EDITS))
OLD_EDITOR = ClientTool(
    name="str_replace_editor",
    description=f"{_EDITOR} `undo_edit` takes back the last edit of a file.",
    input_schema=_commands({**EDITS, "insert": {"insert_line": LINE, "new_str": TEXT}, "undo_edit": {"path": TEXT}}),
)
MEMORY = ClientTool(
    name="memory",
    description=(
        "Keeps notes in files under /memories that remain after the conversation. View the folder before you start, "
        "and write down what later conversations need. The commands are those of a text editor, `delete`, which "
        "removes a file or a folder, and `rename`, which moves it."
    ),
    input_schema=_commands({**EDITS, "delete": {"path": TEXT}, "rename": {"old_path": TEXT, "new_path": TEXT}}),
)

CLIENT_TOOLS: Mapping[str, ClientTool] = {
    "bash_20241022": BASH,
    "bash_20250124": BASH,
    "text_editor_20241022": OLD_EDITOR,
    "text_editor_20250124": OLD_EDITOR,
    "text_editor_20250429": EDITOR,
    "text_editor_20250728": EDITOR,
    "memory_20250818": MEMORY,
}
"""The supported types."""
