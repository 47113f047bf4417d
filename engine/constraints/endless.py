"""Finds constraints that no finite answer can satisfy, because a schema or a rule recurses without end.

Both checks compute a least fixed point: a subschema or rule can end if everything that it requires can end. Anything
that a check does not understand counts as able to end, so only constraints that are certainly endless are refused.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Container, Iterator
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote

_LARK_RULE = re.compile(r"^[?!]*([a-zA-Z_]\w*)(?:\[[^\]\n]*\])?(?:\.-?\d+)?[ \t]*:(?!:)", re.MULTILINE)
_LARK_OTHER_LINE = re.compile(r"^[?!\w](?![^\n]*:)|%lark|::", re.MULTILINE)
"""Lines that the check cannot interpret: other syntax, nested grammars, and parametric rules."""

_LARK_TOKEN = re.compile(
    r"""(?P<comment>//[^\n]*|\#[^\n]*)
    | (?P<literal>"(?:\\.|[^"\\])*"i?|/(?:\\.|[^/\\\n])+/[a-z]*|<[^>\n]*>)
    | (?P<name>[a-zA-Z_]\w*)
    | (?P<optional>\*|\?|\{\s*0?\s*,\s*\d*\s*\}|~\s*0\b)
    | (?P<open>[(\[])
    | (?P<close>[)\]])
    | (?P<either>\|)
    | (?P<other>.)""",
    re.VERBOSE | re.DOTALL,
)


def is_endless_schema(schema: Any) -> bool:
    """True if a JSON Schema requires an infinitely deep value."""
    nodes = _reachable(schema)
    can_end: set[int] = set()
    while True:
        # Children come later in the list than their parents, so one pass is enough for most schemas.
        found = {id(node) for node in reversed(nodes) if id(node) not in can_end and _ends(node, schema, can_end)}
        can_end |= found
        if id(schema) in can_end or not found:
            return isinstance(schema, dict) and id(schema) not in can_end


def _reachable(root: Any) -> list[Any]:
    """Return every subschema that a value of the schema `root`, or a part of the value, may have to satisfy."""
    nodes, seen = [root], {id(root)}
    for node in nodes:
        for child in _children(node, root):
            if id(child) not in seen:
                seen.add(id(child))
                nodes.append(child)
    return nodes


def _children(node: Any, root: Any) -> Iterator[Any]:
    if not isinstance(node, dict):
        return
    for keyword in ("allOf", "anyOf", "oneOf", "prefixItems"):
        if isinstance(node.get(keyword), list):
            yield from node[keyword]
    for keyword in ("properties", "patternProperties"):
        yield from _named(node, keyword).values()
    yield node.get("additionalProperties")
    items = node.get("items")
    yield from items if isinstance(items, list) else [items] if isinstance(items, dict) else []
    if "$ref" in node:
        yield _target(node["$ref"], root)


def _ends(node: Any, root: Any, can_end: set[int]) -> bool:
    """Return whether a finite value satisfies `node`. `can_end` contains the `id()` of each subschema that a finite
    value is known to satisfy.
    """
    if not isinstance(node, dict):
        return True

    def ends(child: Any) -> bool:
        return not isinstance(child, dict) or id(child) in can_end

    if "$ref" in node and not ends(_target(node["$ref"], root)):
        return False
    for keyword, quantifier in (("allOf", all), ("anyOf", any), ("oneOf", any)):
        if isinstance(node.get(keyword), list) and not quantifier(map(ends, node[keyword])):
            return False
    if "const" in node or "enum" in node or "type" not in node:
        return True
    types = node["type"] if isinstance(node["type"], list) else [node["type"]]
    return any(
        _object_ends(node, ends) if one == "object" else one != "array" or all(map(ends, _required_items(node)))
        for one in types
    )


def _named(node: dict[str, Any], keyword: str) -> dict[str, Any]:
    """Return the subschemas under a keyword that maps names or patterns to them."""
    return node[keyword] if isinstance(node.get(keyword), dict) else {}


def _object_ends(node: dict[str, Any], ends: Callable[[Any], bool]) -> bool:
    """Return whether all members that every object must contain can end."""
    properties, patterns = _named(node, "properties"), _named(node, "patternProperties")
    additional = node.get("additionalProperties", True)
    others = [*patterns.values(), *([] if additional is False else [additional])]
    can_add = any(map(ends, others))
    required, at_least = node.get("required"), node.get("minProperties")
    for name in required if isinstance(required, list) else ():
        if not isinstance(name, str):
            continue
        if name in properties:
            if not ends(properties[name]):
                return False
        else:
            matching = [child for pattern, child in patterns.items() if _surely_matches(pattern, name)]
            if not all(map(ends, matching)) or (others and not can_add):
                return False
    num_ending = sum(map(ends, properties.values()))
    return can_add or not isinstance(at_least, int) or at_least <= num_ending


def _surely_matches(pattern: str, name: str) -> bool:
    """True if a pattern matches a name, and has no special characters but `^` and `$` around it."""
    return re.fullmatch(r"\^?[\w -]*\$?", pattern) is not None and re.search(pattern, name) is not None


def _required_items(node: dict[str, Any]) -> list[Any]:
    """Return the subschemas of the items that every array must contain."""
    at_least, items = node.get("minItems"), node.get("items")
    if not isinstance(at_least, int) or at_least < 1:
        return []
    first = items if isinstance(items, list) else node.get("prefixItems")
    first = first if isinstance(first, list) else []
    return [*first[:at_least], *([items] if at_least > len(first) and isinstance(items, dict) else [])]


def _target(reference: Any, root: Any) -> Any:
    """Return the subschema that a JSON pointer (RFC 6901) refers to, or None for any other reference."""
    if not isinstance(reference, str) or not re.match(r"#(/|$)", reference):
        return None
    node = root
    for part in unquote(reference[1:]).split("/")[1:]:
        name = part.replace("~1", "/").replace("~0", "~")
        if isinstance(node, dict) and name in node:
            node = node[name]
        elif isinstance(node, list) and name.isdecimal() and int(name) < len(node):
            node = node[int(name)]
        else:
            return None
    return node


def is_endless_lark(text: str) -> bool:
    """True if the rule `start` of a grammar in llguidance's Lark syntax can never end."""
    heads = [*_LARK_RULE.finditer(text)]
    if not heads or _LARK_OTHER_LINE.search(text):
        return False
    ends = [*(one.start() for one in heads[1:]), len(text)]
    unfinished = {one.group(1): text[one.end() : end].split("\n%")[0] for one, end in zip(heads, ends, strict=True)}
    found = ["start"]
    while "start" in unfinished and found:
        found = [name for name, body in unfinished.items() if _body_ends(body, unfinished)]
        for name in found:
            del unfinished[name]
    return "start" in unfinished


@dataclass(slots=True)
class _Group:
    """The state of the alternatives read since an opening bracket."""

    is_optional: bool = False
    has_ending: bool = False
    """True if an earlier alternative can end."""
    can_end: bool = True
    """True if all items of the current alternative except the last can end."""
    last_ends: bool = True

    def add(self, ends: bool) -> None:
        self.can_end &= self.last_ends
        self.last_ends = ends

    def close(self) -> bool:
        return self.is_optional or self.has_ending or (self.can_end and self.last_ends)


def _body_ends(body: str, unfinished: Container[str]) -> bool:
    """Return whether the rule's body has an alternative without unfinished rules."""
    groups = [_Group()]
    for token in _LARK_TOKEN.finditer(body):
        group = groups[-1]
        match token.lastgroup:
            case "literal":
                group.add(True)
            case "name":
                group.add(token.group() not in unfinished)
            case "optional":
                group.last_ends = True
            case "open":
                groups.append(_Group(is_optional=token.group() == "["))
            case "close" if len(groups) > 1:
                groups.pop()
                groups[-1].add(group.close())
            case "either":
                group.has_ending |= group.can_end and group.last_ends
                group.can_end = group.last_ends = True
    return groups[0].close()
