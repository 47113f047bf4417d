"""Reads the input of a custom tool from the arguments `{"input": "..."}` of the function that stands for it."""

from __future__ import annotations

import json
import re

from loramux.platform.responses_api.response_tools import INPUT

_OPENING = re.compile(rf'\s*\{{\s*"{INPUT}"\s*:\s*"')
_PIECE = re.compile(r'[^"\\]+|\\(?:u[0-9a-fA-F]{4}|[^u])')
_HIGH = re.compile(r"[\ud800-\udbff]\Z")
"""The first half of a character that JSON writes as two escapes."""
MAX_OPENING = 256
"""Longest beginning of the arguments that is held back before the input, in characters."""


class CustomInput:
    """Decodes the string while it arrives in pieces of any length.

    Arguments of another form, which only a model without a grammar can write, are returned as they are.
    """

    def __init__(self) -> None:
        self._held = ""
        self._is_inside = self._is_ended = self._is_other = False

    def feed(self, text: str) -> str:
        """Add a piece of the arguments, and return the text of the input that is now certain."""
        self._held += text
        if not self._is_inside and not self._is_other:
            opening = _OPENING.match(self._held)
            if opening is None:
                self._is_other = len(self._held) > MAX_OPENING
                return self._taken() if self._is_other else ""
            self._is_inside = True
            self._held = self._held[opening.end() :]
        return self._taken() if self._is_other else self._decoded()

    def finish(self) -> str:
        """Return the rest of the input at the end of the arguments."""
        if self._is_inside:
            # An escape that was cut off, or half of a character, is not text.
            self._held = ""
        return self._taken()

    def _taken(self) -> str:
        text, self._held = self._held, ""
        return text

    def _decoded(self) -> str:
        at, pieces = 0, []
        while not self._is_ended and (piece := _PIECE.match(self._held, at)) is not None:
            pieces.append(piece.group())
            at = piece.end()
        if self._held[at : at + 1] == '"':
            self._is_ended = True
        raw, self._held = "".join(pieces), "" if self._is_ended else self._held[at:]
        try:
            text = str(json.loads(f'"{raw}"', strict=False))
        except ValueError:
            text = raw
        if not self._is_ended and _HIGH.search(text):
            text, self._held = text[:-1], raw[-len("\\uXXXX") :] + self._held
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
