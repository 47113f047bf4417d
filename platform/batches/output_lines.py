"""The lines of a batch's output and error files, in OpenAI's shape."""

from __future__ import annotations

from typing import Any

import msgspec

_SEPARATORS = {mark.encode(): f"\\u{ord(mark):04x}".encode() for mark in "\x85\u2028\u2029"}
"""Characters that many clients take for the end of a line (Python's `str.splitlines` does), with their escapes."""


def answered(line: int, batch_id: str, custom_id: str, request_id: str, status: int, body: dict[str, Any]) -> bytes:
    """The line of a request that got an answer. `body` is the answer, or an error's envelope."""
    response = {"status_code": status, "request_id": request_id, "body": body}
    return _line(line, batch_id, custom_id, response, None)


def not_run(line: int, batch_id: str, custom_id: str, code: str, message: str) -> bytes:
    """The line of a request that the batch's end has prevented."""
    return _line(line, batch_id, custom_id, None, {"code": code, "message": message})


def _line(line: int, batch_id: str, custom_id: str, response: Any, error: Any) -> bytes:
    identifier = f"batch_req_{batch_id.removeprefix('bat_')}_{line}"
    document = {"id": identifier, "custom_id": custom_id, "response": response, "error": error}
    content = msgspec.json.encode(document)
    for mark, escape in _SEPARATORS.items():
        content = content.replace(mark, escape)
    return content + b"\n"
