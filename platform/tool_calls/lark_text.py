"""Parts of grammars for text and markers, in llguidance's variant of Lark."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping

ANY = r"(.|\n)*"


def literal(text: str) -> str:
    return json.dumps(text) if text else ""


def text_without(*texts: str) -> str:
    return text_without_pattern(any_of(texts))


def text_without_pattern(pattern: str, repeats: str = "*") -> str:
    """Return the expression for text in which the pattern matches nothing. `repeats` counts the text's characters."""
    return rf"/(.|\n){repeats}/ & ~/{ANY}({pattern}){ANY}/"


def any_of(texts: Iterable[str]) -> str:
    return "(" + "|".join(map(escaped, texts)) + ")"


def escaped(text: str) -> str:
    return re.escape(text).replace("/", r"\/")


def spelled(text: str, ids: Mapping[str, int]) -> str:
    """Return the expression for a marker, which is or contains the special tokens in `ids`."""
    return " ".join(_part(one, ids) for one in marker_parts(text, ids))


def joined(lines: list[str], name: str, before: str, text: str, ids: Mapping[str, int]) -> str:
    """Return the expression for the terminal `before` and the marker `text`.

    Text at the start of the marker must be part of the same terminal, because the lexer takes the longest match. `name`
    names that terminal.
    """
    first, *rest = marker_parts(text, ids)
    if first in ids:
        name, rest = before, [first, *rest]
    else:
        lines.append(f"{name}: {before} {literal(first)}")
    return " ".join([name, *(_part(one, ids) for one in rest)])


def marker_parts(text: str, ids: Mapping[str, int]) -> list[str]:
    """Split a marker into special tokens and the text around them."""
    longest_first = sorted(ids, key=len, reverse=True)
    parts = re.split(f"({'|'.join(map(re.escape, longest_first))})", text) if ids else [text]
    return [part for part in parts if part] or [""]


def _part(part: str, ids: Mapping[str, int]) -> str:
    return f"<[{ids[part]}]>" if part in ids else literal(part)
