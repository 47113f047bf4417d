from __future__ import annotations

import json
import re

import pytest
from llguidance import LLMatcher

from loramux.platform.grammars.check import checked_grammar
from loramux.platform.grammars.lark_pattern import MAX_PATTERN, UnusableLark, pattern_of_lark
from tests.engine.byte_vocabulary import byte_vocabulary, ids

PATCH = r"""
start: begin_patch hunk+ end_patch
begin_patch: "*** Begin Patch" LF
end_patch: "*** End Patch" LF?

hunk: add_hunk | delete_hunk
  | update_hunk
add_hunk: "*** Add File: " filename LF add_line+
delete_hunk: "*** Delete File: " filename LF
update_hunk: "*** Update File: " filename LF change?

filename: /(.+)/
add_line: "+" /(.*)/ LF -> line
change: (change_context | change_line)+
change_context: ("@@" | "@@ " /(.+)/) LF
change_line: ("+" | "-" | " ") /(.*)/ LF

%import common.LF
"""
"""A grammar of patches, like those that coding agents send with a custom tool."""

ADDED = '*** Begin Patch\n*** Add File: a.py\n+print("\\t")\n*** End Patch'


@pytest.mark.parametrize(
    ("grammar", "matching", "other"),
    [
        ('start: "a"+', ["a", "aaa"], ["", "b"]),
        ('start: "a" | "b"\n  | C // comment\nC: "c"i', ["a", "b", "c", "C"], ["ab"]),
        ('start: ("a" "b")~2', ["abab"], ["ab", "ababab"]),
        ('start: "a"~1..2 ["b"]', ["a", "aab"], ["aaab"]),
        ('?start: "a".."c"', ["b"], ["d"]),
        (r"start: /a.b/s", ["a\nb"], ["ab"]),
        (r"start: /a\/b/i", ["A/B"], ["a\\/b"]),
        (r'start: "\"\\\n\u00e9.*"', ['"\\\né.*'], ['"\\\né.x']),
        (r'start: "\x41\U0001F98A\ud83e\udd8a\t\'\q"i', ["A🦊🦊\t\\'\\q", "a🦊🦊\t\\'\\Q"], ["A"]),
        ('start: "a\tb"', ["a\tb"], ["ab"]),
        ("start: C\n%import common.C_COMMENT -> C", ["/**/", "/* a*b\n/ **/"], ["/* */ */", "/*/"]),
        ("start: A\n%import common.CPP_COMMENT -> A", ["// a//"], ["//\n", "/"]),
        ("start: A\n%import common.SH_COMMENT -> A", ["# a#"], ["#\n"]),
        ("start: A\n%import common.SQL_COMMENT -> A", ["-- a"], ["--\n"]),
        ("start: INT -> number\n%import common (INT, WS)", ["12"], ["1.2", ""]),
        ("start: N\n%import common.SIGNED_NUMBER -> N", ["-1.5e3", ".5"], ["-"]),
        ('start: A\nA.2: "a"', ["a"], ["b"]),
        ("start: (\n  A\n  B\n)\nA: /x/\nB: /y/", ["xy"], ["x"]),
        (PATCH, [ADDED, ADDED + "\n"], [ADDED[:-1], ADDED.replace("+", "")]),
    ],
)
def test_pattern_matches_the_texts_of_the_grammar(grammar: str, matching: list[str], other: list[str]) -> None:
    pattern = pattern_of_lark(grammar)
    assert [text for text in (*matching, *other) if re.fullmatch(pattern, text)] == matching


@pytest.mark.parametrize(
    ("grammar", "problem"),
    [
        ("", "'start' is not defined"),
        ('start: "a" start', "line 1: 'start' is recursive"),
        ("start: a\na: b\nb: a", "line 3: 'a' is recursive"),
        ("start: x", "line 1: 'x' is not defined"),
        ('start: "a"\n%ignore " "', "line 2: '%ignore' is not supported"),
        ('start: "a"\nstart: "b"', "line 2: 'start' is defined twice"),
        ("start: A\n%import common.SQL", "line 2: common has no terminal 'SQL'"),
        ("start: A\n%import python.NAME", "line 2: only terminals of common"),
        ('start: ("a"', "ends too early"),
        ('start: "a")', "line 1: ')' is not supported"),
        ("start: /a/x", "only the flags i and s"),
        ('start: "ab".."c"', "two single characters"),
        ('start: "a"~3..2', "from n to m"),
        ('start: "a"~9999', "from n to m"),
        ("start: 'a'", 'line 1 has an unexpected character "\'"'),
        (r'start: "\x4"', "not a valid string"),
        (r'start: "\ud83d"', "not a valid string"),
        (r'start: "\Uffffffff"', "not a valid string"),
        ("start", "needs a colon"),
        ("start: " + "(" * 100 + '"a"' + ")" * 100, "nested too deeply"),
        ("\n".join(["start: r0", *(f"r{n}: r{n + 1}" for n in range(100)), 'r100: "a"']), "nested too deeply"),
        ("\n".join(["start: r0", *(f"r{n}: r{n + 1} r{n + 1}" for n in range(40)), 'r40: "a"']), str(MAX_PATTERN)),
    ],
)
def test_unusable_grammar_is_refused_with_the_reason(grammar: str, problem: str) -> None:
    with pytest.raises(UnusableLark, match=re.escape(problem)):
        pattern_of_lark(grammar)


def test_pattern_constrains_a_string_in_json() -> None:
    pattern = f"^(?:{pattern_of_lark(PATCH)})$"
    schema = {"type": "object", "properties": {"input": {"type": "string", "pattern": pattern}}, "required": ["input"]}
    vocabulary = byte_vocabulary()
    matcher = LLMatcher(vocabulary, checked_grammar("json_schema", json.dumps(schema), vocabulary))
    assert matcher.consume_tokens(ids(json.dumps({"input": ADDED})))
    assert matcher.is_accepting()
    matcher.reset()
    assert not matcher.consume_tokens(ids(json.dumps({"input": ADDED.replace("Begin", "End")})))
