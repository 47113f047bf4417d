"""Reads the file of a batch line by line, and checks every line."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any, BinaryIO

from loramux.adapter_store.formats.files.strict_json import InvalidJson, parse_strict_json
from loramux.platform.batches.batch_rows import BatchError

MAX_LINES = 50_000
"""Maximum number of requests in a batch, as in OpenAI's API."""
MAX_ERRORS = 100
"""Number of wrong lines after which the rest of a file is not read."""
MAX_CUSTOM_ID = 512
MAX_MODEL = 256

_FIELDS = frozenset({"custom_id", "method", "url", "body"})


@dataclass(frozen=True, slots=True)
class InputLine:
    """A request of a batch. `line` counts from 1. The line is the bytes `[start, start + num_bytes)` of the file."""

    line: int
    start: int
    num_bytes: int
    model: str


class InvalidLine(Exception):
    """A line cannot be used. The message never quotes the line."""

    def __init__(self, code: str, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.param = param


def read_lines(path: Path, endpoint: str, max_line_bytes: int) -> Iterator[InputLine | BatchError]:
    """Yield the requests of a file, and an error for each wrong line. Empty lines are skipped.

    The file is never whole in memory. After MAX_ERRORS errors, or one error about the whole file, the rest is not read.
    """
    seen: set[bytes] = set()
    num_lines = num_errors = 0
    with path.open("rb") as file:
        for number, start, line in _pieces(file, max_line_bytes):
            if line is not None and not line.strip():
                continue
            num_lines += 1
            if num_lines > MAX_LINES:
                yield BatchError("too_many_requests_in_batch", f"a batch has at most {MAX_LINES} requests")
                return
            try:
                if line is None:
                    raise InvalidLine("line_too_long", f"a line must not exceed {max_line_bytes} bytes")
                custom_id, body = parsed_line(line, endpoint)
                digest = blake2b(custom_id.encode(), digest_size=16).digest()
                if digest in seen:
                    raise InvalidLine("duplicate_custom_id", "an earlier line has the same custom_id", "custom_id")
                seen.add(digest)
                yield InputLine(number, start, len(line), body["model"])
            except InvalidLine as error:
                yield BatchError(error.code, str(error), error.param, number)
                num_errors += 1
                if num_errors == MAX_ERRORS:
                    return
    if not num_lines:
        yield BatchError("empty_file", "the file has no requests")


def parsed_line(line: bytes, endpoint: str) -> tuple[str, dict[str, Any]]:
    """Return a line's `custom_id` and its body. Raises InvalidLine."""
    try:
        document = parse_strict_json(line)
    except InvalidJson as error:
        raise InvalidLine("invalid_json_line", f"the line is not valid JSON: {error}") from None
    if not isinstance(document, dict):
        raise InvalidLine("invalid_json_line", "the line is not a JSON object")
    if document.keys() != _FIELDS:
        raise InvalidLine("invalid_request", f"a line has exactly the fields {', '.join(sorted(_FIELDS))}")
    custom_id, body = document["custom_id"], document["body"]
    if not isinstance(custom_id, str) or not 1 <= len(custom_id) <= MAX_CUSTOM_ID:
        raise InvalidLine(
            "invalid_custom_id", f"custom_id must be a text of 1 to {MAX_CUSTOM_ID} characters", "custom_id"
        )
    if document["method"] != "POST":
        raise InvalidLine("invalid_method", "the method must be POST", "method")
    if document["url"] != endpoint:
        raise InvalidLine("mismatched_url", f"the batch is for {endpoint}", "url")
    if not isinstance(body, dict):
        raise InvalidLine("invalid_request", "body must be an object", "body")
    model = body.get("model")
    # PostgreSQL cannot store NUL in a text.
    if not isinstance(model, str) or not 1 <= len(model) <= MAX_MODEL or "\x00" in model:
        raise InvalidLine("invalid_model", f"the model must be a text of 1 to {MAX_MODEL} characters", "body.model")
    if body.get("stream"):
        raise InvalidLine("stream_not_supported", "a batch has no streams", "body.stream")
    return custom_id, body


def _pieces(file: BinaryIO, max_bytes: int) -> Iterator[tuple[int, int, bytes | None]]:
    """Yield each line's number, its place in the file and its bytes, or None if it is too long."""
    number, start = 0, 0
    while line := file.readline(max_bytes + 1):
        number += 1
        begin, start = start, start + len(line)
        if len(line) <= max_bytes or line.endswith(b"\n"):
            yield number, begin, line
            continue
        yield number, begin, None
        while (rest := file.readline(max_bytes)) and not rest.endswith(b"\n"):
            start += len(rest)
        start += len(rest)
