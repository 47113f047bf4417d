"""Names the base that an adapter was trained on, in the message of an adapter that does not fit the served base.

The server's own messages never repeat a tenant's text. This one is for the owner of the files, on the owner's machine.
"""

from __future__ import annotations

from pathlib import Path

from loramux.adapter_store.errors import printable
from loramux.adapter_store.formats.files.file_names import CONFIG_FILE
from loramux.adapter_store.formats.files.strict_json import InvalidJson, parse_strict_json

_CODES = ("base_mismatch", "unknown_module")
"""The codes of rejections whose usual cause is another base."""

_MAX_LEN = 200
"""Longest name of a base to show, in characters."""


def with_recorded_base(code: str | None, message: str, directory: Path) -> str:
    """Return the message of a rejection. If the bases differ, add the base that the directory's configuration names."""
    if code not in _CODES:
        return message
    try:
        config = parse_strict_json((directory / CONFIG_FILE).read_bytes())
    except (OSError, InvalidJson):
        return message
    base = config.get("base_model_name_or_path") if isinstance(config, dict) else None
    if not isinstance(base, str) or not base:
        return message
    return f"{message}; {CONFIG_FILE} says that the adapter was trained on {printable(base, _MAX_LEN)}"
