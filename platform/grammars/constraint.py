"""The constraint that a request body puts on its answer, before compilation."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, Literal

from loramux.platform.errors import InvalidRequest

MAX_TEXT_BYTES = 128 * 1024
"""Longest schema, pattern, grammar or list of choices, in bytes of UTF-8."""

MAX_CHOICES = 1024
"""Maximum number of entries in `choice`."""

ConstraintKind = Literal["json_schema", "regex", "choice", "grammar", "structural_tag", "answer"]


@dataclass(frozen=True, slots=True)
class Constraint:
    """`text` is the pattern for a `regex`, the grammar for a `grammar`, and a JSON document for any other kind."""

    kind: ConstraintKind
    text: str
    param: str

    @staticmethod
    def of_json(kind: ConstraintKind, document: Any, param: str) -> Constraint:
        return Constraint.of_text(kind, json.dumps(document, ensure_ascii=False, separators=(",", ":")), param)

    @staticmethod
    def of_text(kind: ConstraintKind, text: str, param: str) -> Constraint:
        try:
            num_bytes = len(text.encode())
        except UnicodeEncodeError as error:
            raise InvalidRequest("a lone surrogate cannot be generated", param=param, code="grammar_refused") from error
        if num_bytes > MAX_TEXT_BYTES:
            about = ""
            if kind == "answer":
                about = f" for the schemas of all tools and of the response format together, which have {num_bytes}"
            raise InvalidRequest(
                f"at most {MAX_TEXT_BYTES} bytes are allowed{about}", param=param, code="grammar_too_large"
            )
        return Constraint(kind, text, param)
