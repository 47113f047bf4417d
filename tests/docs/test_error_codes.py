from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from tests.docs.write import DOCS

RETRIED = {"RateLimited", "Unavailable"}
"""The errors after which a client should repeat its call."""

SLOTS = {"TenantSlots", "TransferSlots"}
"""Limits whose refusals are such errors."""


def codes_of_retries() -> Iterator[str]:
    for folder in ("platform", "admin"):
        for path in (DOCS.parent / folder).rglob("*.py"):
            text = path.read_text()
            # Parsing all files takes seconds.
            if any(f"{name}(" in text for name in (*RETRIED, *SLOTS)):
                yield from _codes_in(text)


def _codes_in(text: str) -> Iterator[str]:
    for call in ast.walk(ast.parse(text)):
        if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name):
            continue
        if call.func.id == "TransferSlots" and isinstance(what := call.args[0], ast.Constant):
            yield f"too_many_{what.value!s}"
        if call.func.id == "TenantSlots" and isinstance(code := call.args[2], ast.Constant):
            yield str(code.value)
        for argument in call.keywords if call.func.id in RETRIED else ():
            if argument.arg == "code" and isinstance(argument.value, ast.Constant):
                yield str(argument.value.value)


def test_every_code_after_which_a_call_can_be_repeated_is_in_a_table_of_errors() -> None:
    listed = {
        code
        for page in ("clients.md", "operations.md")
        for row in re.findall(r"^\|.*", (DOCS / page).read_text(), re.MULTILINE)
        for code in re.findall(r"`([a-z_]+)`", row)
    }
    codes = set(codes_of_retries())
    assert codes - listed == set()
    assert len(codes) > 25
