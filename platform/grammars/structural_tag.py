"""The grammar of a structural tag, in llguidance's variant of Lark."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

Compile = Callable[[str], list[dict[str, Any]]]
"""Returns the grammars of a text in Lark or GBNF, the main one first."""

ToJson = Callable[[dict[str, Any] | bool], str]
"""Returns the expression for the values of a schema."""

_ANY = r"(.|\n)"


class UnusableFormat(Exception):
    """No grammar can express the format. The message says why."""


def structural_tag_grammar(wanted: Mapping[str, Any], json_expression: ToJson, compiled: Compile) -> str:
    """Return the grammar of a format, in llguidance's JSON. Raises UnusableFormat."""
    builder = _Builder(json_expression, compiled)
    start = builder.expression(wanted, ())
    lark = "\n".join(["%llguidance {}", *builder.lines, f"start: {start}", ""])
    return json.dumps({"grammars": [{"lark_grammar": lark}, *builder.grammars]})


class _Builder:
    """Collects the rules and the named grammars to which an expression refers.

    `ends` are the strings of which one must follow a format. They are part of its expression: the lexer takes the
    longest match, so free text and the string that ends it must form a single terminal. If `ends` is empty, the answer
    ends with the format, or whatever follows it cannot be taken for a part of it.

    Text that matches a regex ends with the first of `ends` after which the regex is satisfied.
    """

    def __init__(self, json_expression: ToJson, compiled: Compile) -> None:
        self.lines: list[str] = []
        self.grammars: list[dict[str, Any]] = []
        self._json_expression = json_expression
        self._compiled = compiled

    def expression(self, wanted: Mapping[str, Any], ends: Sequence[str]) -> str:
        match wanted["type"]:
            case "const_string":
                return _joined(_text(wanted["value"]), ends)
            case "regex":
                return self._terminal(f"/{_escaped(wanted['pattern'])}/", ends)
            case "any_text":
                return self._any_text(wanted, ends)
            case "json_schema":
                return _joined(self._rule(self._json_expression(wanted["json_schema"])), ends)
            case "grammar":
                return _joined(self._grammar(wanted["grammar"]), ends)
            case "sequence":
                return self._sequence(wanted["elements"], ends)
            case "or":
                return _either(self.expression(one, ends) for one in wanted["elements"])
            case "tag":
                return _joined(self._tag(wanted), ends)
            case "triggered_tags":
                return self._triggered_tags(wanted, ends)
            case "tags_with_separator":
                return _joined(self._tags_with_separator(wanted), ends)
            case "repeat" if wanted["min"] == wanted["max"] == 0:
                return _joined(_text(""), ends)
            case "optional" | "plus" | "star" | "repeat" as kind:
                return _joined(f"({self._limited(wanted['content'])}){_repeats(kind, wanted)}", ends)
            case kind:
                raise UnusableFormat(f"{kind} is not a format of structural tags")

    def _sequence(self, elements: Sequence[Mapping[str, Any]], ends: Sequence[str]) -> str:
        parts = []
        current = elements[0]
        for after in elements[1:]:
            begin = _begin(after) if current["type"] == "regex" else ""
            parts.append(self.expression(current, [begin]) if begin else self._limited(current))
            current = _without_begin(after) if begin else after
        return " ".join([*parts, self.expression(current, ends)])

    def _limited(self, wanted: Mapping[str, Any]) -> str:
        """Return the expression of a format that other text follows."""
        if _is_free(wanted):
            raise UnusableFormat(
                f"{wanted['type']} has no end here: put it last, or into a tag, whose end then follows the text"
            )
        return self.expression(wanted, ())

    def _tag(self, tag: Mapping[str, Any], begin: str | None = None) -> str:
        ends = [tag["end"]] if isinstance(tag["end"], str) else tag["end"]
        if "" in ends and _is_free(tag["content"]):
            raise UnusableFormat("the end of a tag with free text must not be empty")
        begin = tag["begin"] if begin is None else begin
        return f"{_text(begin)} {self.expression(tag['content'], ends)}"

    def _triggered_tags(self, wanted: Mapping[str, Any], ends: Sequence[str]) -> str:
        triggers = wanted["triggers"]
        text = self._text_without([*triggers, *(wanted.get("excludes") or ()), *ends])
        groups = []
        for trigger in triggers:
            # As in vLLM, a tag belongs to the first trigger with which it begins.
            tags = [one for one in wanted["tags"] if _trigger_of(one, triggers) == trigger]
            if tags:
                head = self._named(f"{text} {_text(trigger)}")
                rest = [self._tag(one, one["begin"][len(trigger) :]) for one in tags]
                groups.append(f"{head} {_either(rest)}")
        group, tail = self._rule(_either(groups)), self._named(f"{text} {_choice(ends)}") if ends else text
        stops, ended = wanted.get("stop_after_first", False), _joined("", ends)
        if wanted.get("at_least_one", False):
            first = _either(self._tag(one) for one in wanted["tags"])
            return f"{first} {ended}" if stops else f"{first} {group}* {tail}"
        return f"({group} {ended} | {tail})" if stops else f"{group}* {tail}"

    def _tags_with_separator(self, wanted: Mapping[str, Any]) -> str:
        tag = self._rule(_either(map(self._tag, wanted["tags"])))
        several = tag if wanted["stop_after_first"] else f"{tag} ({_text(wanted['separator'])} {tag})*"
        return several if wanted["at_least_one"] else f"({several})?"

    def _any_text(self, wanted: Mapping[str, Any], ends: Sequence[str]) -> str:
        most = wanted.get("max_chars")
        text = self._text_without([*(wanted.get("excludes") or ()), *ends], "*" if most is None else f"{{0,{most}}}")
        return self._named(f"{text} {_choice(ends)}") if ends else text

    def _text_without(self, forbidden: Sequence[str], repeats: str = "*") -> str:
        """Add a terminal for text without the strings in `forbidden`, and return its name."""
        rule = f"/{_ANY}{repeats}/"
        if forbidden:
            strings = "|".join(_escaped(re.escape(one)) for one in forbidden)
            rule += f" & ~/{_ANY}*({strings}){_ANY}*/"
        return self._named(rule)

    def _terminal(self, expression: str, ends: Sequence[str]) -> str:
        name = self._named(expression)
        if not ends:
            return name
        ended = self._named(f"{name} {_choice(ends)}")
        # With an empty end, the shortest match would never be longer than the regex requires.
        return ended if "" in ends else self._add(f"r{len(self.lines)}", ended, "[lazy]")

    def _named(self, expression: str) -> str:
        """Add a terminal, and return its name."""
        return self._add(f"T{len(self.lines)}", expression)

    def _rule(self, expression: str) -> str:
        return self._add(f"r{len(self.lines)}", expression)

    def _add(self, name: str, expression: str, attribute: str = "") -> str:
        self.lines.append(f"{name}{attribute}: {expression}")
        return name

    def _grammar(self, text: str) -> str:
        first, *others = self._compiled(text)
        name = f"sub_{len(self.grammars)}"
        self.grammars += [{**first, "name": name}, *others]
        return f"@{name}"


def _is_free(wanted: Mapping[str, Any]) -> bool:
    """True if the format can end with text that ends only where the next part begins."""
    match wanted["type"]:
        case "any_text" | "triggered_tags":
            return True
        case "sequence":
            return _is_free(wanted["elements"][-1])
        case "or":
            return any(map(_is_free, wanted["elements"]))
        case _:
            return False


def _begin(wanted: Mapping[str, Any]) -> str:
    """Return the text with which every text of a format begins, as far as it is known."""
    match wanted["type"]:
        case "const_string":
            return str(wanted["value"])
        case "tag":
            return str(wanted["begin"])
        case "sequence":
            return _begin(wanted["elements"][0])
        case _:
            return ""


def _without_begin(wanted: Mapping[str, Any]) -> dict[str, Any]:
    match wanted["type"]:
        case "const_string":
            return {**wanted, "value": ""}
        case "tag":
            return {**wanted, "begin": ""}
        case _:
            first, *others = wanted["elements"]
            return {**wanted, "elements": [_without_begin(first), *others]}


def _trigger_of(tag: Mapping[str, Any], triggers: Sequence[str]) -> str:
    for trigger in triggers:
        if tag["begin"].startswith(trigger):
            return trigger
    raise UnusableFormat(f"the tag that begins with {json.dumps(tag['begin'][:40])} begins with no trigger")


def _repeats(kind: str, wanted: Mapping[str, Any]) -> str:
    if kind != "repeat":
        return {"optional": "?", "plus": "+", "star": "*"}[kind]
    least, most = wanted["min"], wanted["max"]
    if most == -1:
        return f"{{{least},}}"
    if most < least:
        raise UnusableFormat("the max of a repeat must not be below its min")
    return f"{{{least},{most}}}"


def _joined(expression: str, ends: Sequence[str]) -> str:
    return f"{expression} {_choice(ends)}" if ends else expression


def _choice(ends: Sequence[str]) -> str:
    return _either(map(_text, ends))


def _either(expressions: Iterable[str]) -> str:
    found = list(expressions)
    return found[0] if len(found) == 1 else f"({' | '.join(found)})"


def _text(text: str) -> str:
    return json.dumps(text)


_ESCAPES = {"/": r"\/", "\n": r"\n", "\\\n": r"\n"}


def _escaped(pattern: str) -> str:
    """Escape slashes and line breaks, which would end a pattern in Lark."""
    return re.sub(r"\\.|/|\n", lambda found: _ESCAPES.get(found.group(), found.group()), pattern, flags=re.DOTALL)
