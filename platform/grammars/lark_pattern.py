"""Turns a Lark grammar without recursion into one regular expression.

Such a pattern can constrain a string inside JSON, which a grammar cannot. See
https://lark-parser.readthedocs.io/en/stable/grammar.html for the language. Rules and terminals become the same: the
pattern matches the texts that the rule `start` derives.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise, zip_longest

MAX_PATTERN = 64 * 1024
"""Longest pattern, in characters."""
MAX_DEPTH = 64
"""Maximum depth of brackets, and of rules that use other rules."""
MAX_REPEATS = 1024

_TOKEN = re.compile(
    r"""(?P<space>[ \t\r]+|(?://|\#)[^\n]*)
    |(?P<newline>\n)
    |(?P<directive>%[a-z]+)
    |(?P<name>[?!]{0,2}[A-Za-z_][A-Za-z_0-9]*)
    |(?P<string>"(?:[^"\\\n]|\\[^\n])*"i?)
    |(?P<regex>/(?:[^/\\\n]|\\[^\n])+/[a-z]*)
    |(?P<number>[0-9]{1,9})
    |(?P<sign>->|\.\.|[:|()\[\]{}?*+~,.])""",
    re.VERBOSE,
)
_ANY_CASE = "i"
_HEX = "[0-9a-fA-F]"
_ESCAPE = re.compile(rf"\\(x{_HEX}{{2}}|u{_HEX}{{4}}|U{_HEX}{{8}}|.)")
_CONTROLS = {"n": "\n", "r": "\r", "t": "\t", "f": "\f", "\\": "\\", '"': '"'}

_COMMON: Mapping[str, str] = {
    "CNAME": "[A-Za-z_][A-Za-z_0-9]*",
    "CPP_COMMENT": r"//[^\n]*",
    "CR": r"\r",
    "C_COMMENT": r"/\*(?:[^*]|\*+[^*/])*\*+/",
    "DECIMAL": r"(?:[0-9]+\.[0-9]*|\.[0-9]+)",
    "DIGIT": "[0-9]",
    "ESCAPED_STRING": r'"(?:[^"\\\n]|\\.)*"',
    "FLOAT": r"(?:[0-9]+[eE][+-]?[0-9]+|(?:[0-9]+\.[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?)",
    "HEXDIGIT": "[0-9A-Fa-f]",
    "INT": "[0-9]+",
    "LCASE_LETTER": "[a-z]",
    "LETTER": "[A-Za-z]",
    "LF": r"\n",
    "NEWLINE": r"(?:\r?\n)+",
    "NUMBER": r"(?:[0-9]+[eE][+-]?[0-9]+|(?:[0-9]+\.[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?|[0-9]+)",
    "SIGNED_FLOAT": r"[+-]?(?:[0-9]+[eE][+-]?[0-9]+|(?:[0-9]+\.[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?)",
    "SIGNED_INT": "[+-]?[0-9]+",
    "SIGNED_NUMBER": r"[+-]?(?:[0-9]+[eE][+-]?[0-9]+|(?:[0-9]+\.[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?|[0-9]+)",
    "SH_COMMENT": r"#[^\n]*",
    "SQL_COMMENT": r"--[^\n]*",
    "UCASE_LETTER": "[A-Z]",
    "WORD": "[A-Za-z]+",
    "WS": r"[ \t\f\r\n]+",
    "WS_INLINE": r"[ \t]+",
}
"""The terminals of Lark's library `common`."""


class UnusableLark(Exception):
    """The grammar is malformed, recursive, too large, or uses a feature that a pattern cannot express."""


@dataclass(frozen=True, slots=True)
class _Token:
    kind: str
    text: str
    line: int


def pattern_of_lark(grammar: str) -> str:
    """Return the pattern of the rule `start`. Raises UnusableLark."""
    definitions, imports = _definitions(list(_tokens(grammar)))
    return _Patterns(definitions, imports).of("start", 1, 0)


def _tokens(grammar: str) -> Iterator[_Token]:
    at, line = 0, 1
    while at < len(grammar):
        found = _TOKEN.match(grammar, at)
        if found is None:
            raise UnusableLark(f"line {line} has an unexpected character {grammar[at]!r}")
        kind = str(found.lastgroup)
        if kind != "space":
            yield _Token(kind, found.group(), line)
        line += kind == "newline"
        at = found.end()


def _definitions(tokens: list[_Token]) -> tuple[dict[str, list[_Token]], dict[str, str]]:
    """Split a grammar into the bodies of its definitions, and the imported terminals by their names in the grammar."""
    definitions: dict[str, list[_Token]] = {}
    imports: dict[str, str] = {}
    for statement in _statements(tokens):
        first = statement[0]
        if first.text == "%import":
            imports |= _imported(statement)
            continue
        if first.kind != "name":
            raise UnusableLark(f"line {first.line}: {first.text[:40]!r} is not supported here")
        # A priority decides between terminals and does not change which texts match.
        has_priority = [token.kind for token in statement[1:3]] == ["sign", "number"] and statement[1].text == "."
        colon = 3 if has_priority else 1
        if len(statement) <= colon or statement[colon].text != ":":
            raise UnusableLark(f"line {first.line}: the definition needs a colon")
        name = first.text.lstrip("?!")
        if name in definitions:
            raise UnusableLark(f"line {first.line}: {name!r} is defined twice")
        definitions[name] = statement[colon + 1 :]
    return definitions, imports


def _statements(tokens: list[_Token]) -> Iterator[list[_Token]]:
    """Yield the statements. One continues on the next line inside brackets, and if that line begins with `|`."""
    statement: list[_Token] = []
    depth = 0
    visible = [token for token in tokens if token.kind != "newline"]
    ends = {id(token) for token, after in pairwise(tokens) if after.kind == "newline"}
    for token, after in zip_longest(visible, visible[1:]):
        statement.append(token)
        depth += (token.text in ("(", "[")) - (token.text in (")", "]")) if token.kind == "sign" else 0
        continues = depth > 0 or token.text == ":" or (after is not None and after.text == "|")
        if after is None or (id(token) in ends and not continues):
            yield statement
            statement, depth = [], 0


def _imported(statement: list[_Token]) -> dict[str, str]:
    """Return the patterns of an import from `common`."""
    line, texts = statement[0].line, [token.text for token in statement[1:]]
    match texts:
        case ["common", ".", name]:
            names = {name: name}
        case ["common", ".", name, "->", alias]:
            names = {alias: name}
        case ["common", "(", *listed, ")"]:
            names = {name: name for name in listed if name != ","}
        case _:
            raise UnusableLark(f"line {line}: only terminals of common can be imported")
    unknown = next((name for name in names.values() if name not in _COMMON), None)
    if unknown is not None:
        raise UnusableLark(f"line {line}: common has no terminal {unknown[:40]!r}")
    return {alias: _COMMON[name] for alias, name in names.items()}


class _Patterns:
    """Turns definitions into patterns, each once."""

    def __init__(self, definitions: Mapping[str, list[_Token]], imports: Mapping[str, str]) -> None:
        self._definitions = definitions
        self._found = dict(imports)
        self._open: set[str] = set()
        """The definitions that the current one is part of."""

    def of(self, name: str, line: int, depth: int) -> str:
        if name in self._found:
            return self._found[name]
        if name not in self._definitions:
            raise UnusableLark(f"line {line}: {name[:40]!r} is not defined")
        if name in self._open:
            raise UnusableLark(f"line {line}: {name[:40]!r} is recursive, which is not supported")
        self._open.add(name)
        body = _Body(self._definitions[name], self, depth)
        self._found[name] = body.choice()
        body.finish()
        self._open.remove(name)
        return self._found[name]


class _Body:
    """Parses the body of one definition."""

    def __init__(self, tokens: list[_Token], patterns: _Patterns, depth: int) -> None:
        self._tokens = tokens
        self._patterns = patterns
        self._depth = depth
        self._at = 0
        if depth > MAX_DEPTH:
            raise UnusableLark("the grammar is nested too deeply")

    def choice(self) -> str:
        options, size = [self._sequence()], 0
        while self._took("|"):
            options.append(self._sequence())
            size = _limited(size + len(options[-1]))
        return options[0] if len(options) == 1 else f"(?:{'|'.join(options)})"

    def finish(self) -> None:
        if self._at < len(self._tokens):
            raise self._unexpected()

    def _sequence(self) -> str:
        parts, size = [], 0
        while (token := self._next()) is not None and token.text not in ("|", ")", "]", "->"):
            parts.append(self._repeated(self._atom()))
            # Check before joining, because a grammar can name a long definition many times.
            size = _limited(size + len(parts[-1]))
        if self._took("->"):
            self._take("name")
        return "".join(parts)

    def _atom(self) -> str:
        token = self._tokens[self._at]
        self._at += 1
        match token:
            case _Token("name", name, line):
                return f"(?:{self._patterns.of(name, line, self._depth + 1)})"
            case _Token("string", text):
                return self._range(text) if self._took("..") else _literal(text)
            case _Token("regex", text, line):
                return _expression(text, line)
            case _Token("sign", "(" | "[" as bracket):
                self._depth += 1
                if self._depth > MAX_DEPTH:
                    raise UnusableLark("the grammar is nested too deeply")
                inner = self.choice()
                self._depth -= 1
                if not self._took(")" if bracket == "(" else "]"):
                    raise self._unexpected()
                return f"(?:{inner})" if bracket == "(" else f"(?:{inner})?"
        self._at -= 1
        raise self._unexpected()

    def _range(self, first: str) -> str:
        ends = [_text(first), _text(self._take("string"))]
        if any(len(end) != 1 for end in ends):
            raise UnusableLark("a range needs two single characters")
        return f"[{re.escape(ends[0])}-{re.escape(ends[1])}]"

    def _repeated(self, atom: str) -> str:
        for sign in "?*+":
            if self._took(sign):
                return f"(?:{atom}){sign}"
        if not self._took("~"):
            return atom
        least = most = int(self._take("number"))
        if self._took(".."):
            most = int(self._take("number"))
        if not least <= most <= MAX_REPEATS:
            raise UnusableLark(f"a repetition must be from n to m with n <= m <= {MAX_REPEATS}")
        return f"(?:{atom}){{{least},{most}}}"

    def _next(self) -> _Token | None:
        return self._tokens[self._at] if self._at < len(self._tokens) else None

    def _took(self, sign: str) -> bool:
        token = self._next()
        if token is None or token.kind != "sign" or token.text != sign:
            return False
        self._at += 1
        return True

    def _take(self, kind: str) -> str:
        token = self._next()
        if token is None or token.kind != kind:
            raise self._unexpected()
        self._at += 1
        return token.text

    def _unexpected(self) -> UnusableLark:
        token = self._next()
        if token is None:
            return UnusableLark("a definition ends too early")
        return UnusableLark(f"line {token.line}: {token.text[:40]!r} is not supported here")


def _limited(size: int) -> int:
    if size > MAX_PATTERN:
        raise UnusableLark(f"the grammar expands to more than {MAX_PATTERN} characters")
    return size


def _text(string: str) -> str:
    """Return the text of a string token. Raises UnusableLark."""
    try:
        text = _ESCAPE.sub(_unescaped, string.removesuffix(_ANY_CASE)[1:-1])
        # Two escapes can spell the halves of a character.
        return text.encode("utf-16", "surrogatepass").decode("utf-16")
    except (ValueError, OverflowError):
        raise UnusableLark(f"{string[:40]} is not a valid string") from None


def _unescaped(escape: re.Match[str]) -> str:
    """Return the text of an escape. As in Lark, a backslash before other characters stands for itself."""
    kind, digits = escape[1][0], escape[1][1:]
    if kind in "xuU":
        return chr(int(digits, 16))
    return _CONTROLS.get(kind, f"\\{kind}")


def _literal(string: str) -> str:
    escaped = re.escape(_text(string))
    for character, name in (("\n", "n"), ("\r", "r"), ("\t", "t"), ("\f", "f"), ("\v", "v")):
        escaped = escaped.replace(f"\\{character}", f"\\{name}")
    return f"(?i:{escaped})" if string.endswith(_ANY_CASE) else f"(?:{escaped})"


def _expression(token: str, line: int) -> str:
    source, _, flags = token[1:].rpartition("/")
    if not set(flags) <= {"i", "s"}:
        raise UnusableLark(f"line {line}: only the flags i and s are supported")
    source = source.replace(r"\/", "/")
    return f"(?{flags}:{source})"
