"""Submitted forms."""

from __future__ import annotations

from collections.abc import Sequence
from urllib.parse import parse_qsl

from starlette.requests import Request

from loramux.platform.bodies.request_body import read_body
from loramux.platform.errors import InvalidRequest

MAX_FORM_BYTES = 64 * 1024
MAX_FIELDS = 200


class Form:
    def __init__(self, pairs: Sequence[tuple[str, str]]) -> None:
        self._pairs = pairs

    def text(self, name: str) -> str:
        """Return the field's first value, or an empty string if the field was not sent."""
        return next((value.strip() for found, value in self._pairs if found == name), "")

    def all(self, name: str) -> list[str]:
        return [value.strip() for found, value in self._pairs if found == name]

    def optional(self, name: str) -> str | None:
        return self.text(name) or None

    def integer(self, name: str, label: str) -> int:
        """Parse a field as an integer, ignoring spaces and commas between the digits. Raises InvalidRequest."""
        digits = self.text(name).replace(",", "").replace(" ", "").replace("\u202f", "")
        if not (digits.isascii() and digits.removeprefix("-").isdecimal() and len(digits) <= 18):
            raise InvalidRequest(f"{label} must be a whole number", param=name)
        return int(digits)

    def optional_integer(self, name: str, label: str) -> int | None:
        return self.integer(name, label) if self.text(name) else None


async def read_form(request: Request, max_bytes: int = MAX_FORM_BYTES) -> Form:
    """Read the form of a request. Raises InvalidRequest or PayloadTooLarge."""
    body = await read_body(request, max_bytes)
    try:
        pairs = parse_qsl(
            body.decode("ascii"), keep_blank_values=True, max_num_fields=MAX_FIELDS, errors="strict", separator="&"
        )
    except (ValueError, UnicodeDecodeError):
        raise InvalidRequest("the form cannot be read", code="invalid_form") from None
    return Form(pairs)
