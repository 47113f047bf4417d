from __future__ import annotations

import json

import pytest

from loramux.adapter_store.errors import InvalidEval
from loramux.platform.evals.cases import MAX_CASES, MAX_FILE_BYTES, MAX_TEXTS, check_lengths, is_deeper, read_cases

GOOD = {"prompt": "Say hi", "equal": "hi"}


def lines(*cases: dict[str, object]) -> bytes:
    return b"\n".join(json.dumps(case).encode() for case in cases)


def test_lines_are_numbered_as_in_the_file() -> None:
    file = read_cases(
        b"\n" + lines(GOOD) + b"\n\n" + lines({"messages": [{"role": "user", "content": "é"}], "judge": "?"})
    )
    assert [case.line for case in file.cases] == [2, 4]
    assert file.needs_judge
    assert [case.needs_answer for case in file.cases] == [True, True]


def test_line_with_only_a_reference_needs_no_answer() -> None:
    [case] = read_cases(lines({"prompt": "p", "reference": "r"})).cases
    assert not case.needs_answer


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (b"nonsense", "malformed"),
        (b"[]", "not a JSON object"),
        (b'{"prompt": "a", "prompt": "b", "equal": "c"}', "twice"),
        (b'{"prompt": "a", "equal": "\\ud800"}', "surrogate"),
        (b"\xff\xfe", "UTF-8"),
        (
            lines({**GOOD, "regex": "(a+)+$"}),
            "regex is not a field of a line: use prompt, messages, max_tokens, equal, contains, fields, schema,",
        ),
        (lines({**GOOD, "line": 7}), "line is not a field"),
        (lines({"prompt": "a"}), "specify equal"),
        (lines({"equal": "a"}), "either prompt or messages"),
        (lines({**GOOD, "messages": [{"role": "user", "content": "a"}]}), "either prompt or messages"),
        (lines({"messages": [], "equal": "a"}), "messages"),
        (lines({"messages": [{"role": "wizard", "content": "a"}], "equal": "a"}), "messages"),
        (lines({**GOOD, "max_tokens": 1_000_000}), "max_tokens"),
        (lines({**GOOD, "max_tokens": True}), "max_tokens"),
        (lines({"prompt": "a", "contains": ["", "b"]}), "empty text"),
        (lines({"prompt": "a", "fields": {}}), "fields"),
        (lines({"prompt": "a", "schema": {"pattern": "(a+)+$"}}), "pattern is not supported"),
        (lines({"prompt": "a", "schema": {"$ref": "#"}}), "is not supported"),
        (lines({"prompt": "a", "schema": {"type": "text"}}), "type is not supported"),
        (lines({"prompt": "a", "schema": {"properties": {"b": {"items": 3}}}}), "a schema must be"),
        (b'{"prompt": "a", "fields": {"a": ' + b"[" * 40 + b"]" * 40 + b"}}", "too deep"),
        (b'{"prompt": "a", "fields": ' + b'{"a":' * 100_000 + b"1" + b"}" * 100_001, "too deep"),
    ],
)
def test_bad_line_is_named_and_not_quoted(line: bytes, said: str) -> None:
    with pytest.raises(InvalidEval) as caught:
        read_cases(lines(GOOD) + b"\n" + line)
    assert caught.value.param == "file[2]"
    assert said in caught.value.message
    assert "(a+)+" not in caught.value.message


@pytest.mark.parametrize(
    ("content", "code"),
    [
        (b"", "no_cases"),
        (b"\n \n", "no_cases"),
        (b"x" * (MAX_FILE_BYTES + 1), "file_too_large"),
        (lines(*[GOOD] * (MAX_CASES + 1)), "too_many_cases"),
    ],
    ids=["empty", "blank", "large", "many"],
)
def test_bad_file_is_refused(content: bytes, code: str) -> None:
    with pytest.raises(InvalidEval) as caught:
        read_cases(content)
    assert caught.value.code == code


@pytest.mark.parametrize(("value", "depth"), [(1, 0), ([], 1), ({"a": [1]}, 2), ([[[]], {}], 3)])
def test_depth_is_exact(value: object, depth: int) -> None:
    assert not is_deeper(value, depth)
    assert depth == 0 or is_deeper(value, depth - 1)


def test_line_endings_do_not_change_the_checksum() -> None:
    content = lines(GOOD, {**GOOD, "equal": "b"})
    assert {read_cases(one).sha256 for one in (content, content + b"\n", content.replace(b"\n", b"\r\n\r\n"))} == {
        read_cases(content).sha256
    }
    assert read_cases(lines(GOOD)).sha256 != read_cases(content).sha256


def test_only_new_files_have_a_maximum_number_of_texts() -> None:
    longest, longer = (read_cases(lines({"prompt": "p", "contains": ["a"] * (MAX_TEXTS + more)})) for more in (0, 1))
    check_lengths(longest)
    with pytest.raises(InvalidEval) as refused:
        check_lengths(longer)
    assert (refused.value.code, refused.value.param) == ("invalid_line", "file[1]")
