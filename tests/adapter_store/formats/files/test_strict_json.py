from __future__ import annotations

import math
import sys
from collections.abc import Iterator

import pytest

from loramux.adapter_store.formats.files.strict_json import InvalidJson, parse_strict_json


@pytest.mark.parametrize("padding", [0, 5000], ids=["short text", "long text"])
def test_integers_are_read_exactly(padding: int) -> None:
    spaces = b" " * padding
    assert parse_strict_json(spaces + b"[0, -1, 12, 18446744073709551616]") == [0, -1, 12, 1 << 64]
    assert parse_strict_json(spaces + b"9" * 4300) == 10**4300 - 1
    # A string can contain more digits than an integer.
    assert parse_strict_json(spaces + b'["' + b"9" * 5000 + b'", "-0", 7]') == ["9" * 5000, "-0", 7]


def test_negative_zero_is_a_float() -> None:
    zero, one = parse_strict_json(b"[-0, 1]")
    assert isinstance(zero, float)
    assert math.copysign(1.0, zero) == -1.0
    assert isinstance(one, int)


BESIDE = [pytest.param(b'""', id="alone"), pytest.param(b'"-0"', id="beside a minus zero")]
"""Texts beside an integer that decide which function converts it."""


@pytest.fixture
def python_limit(request: pytest.FixtureRequest) -> Iterator[None]:
    """Sets Python's own limit, as PYTHONINTMAXSTRDIGITS does."""
    before = sys.get_int_max_str_digits()
    sys.set_int_max_str_digits(request.param)
    yield
    sys.set_int_max_str_digits(before)


@pytest.mark.parametrize("python_limit", [4300, 0, 5000], indirect=True)
@pytest.mark.parametrize("beside", BESIDE)
@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.usefixtures("python_limit")
def test_integer_has_at_most_4300_digits(beside: bytes, sign: int) -> None:
    longest = b"-" * (sign < 0) + b"9" * 4300
    [_, integer] = parse_strict_json(b"[%b, %b]" % (beside, longest))
    assert integer == sign * (10**4300 - 1)
    with pytest.raises(InvalidJson, match="a number is too large"):
        parse_strict_json(b"[%b, %b9]" % (beside, longest))


@pytest.mark.parametrize("python_limit", [640], indirect=True)
@pytest.mark.parametrize("beside", BESIDE)
@pytest.mark.usefixtures("python_limit")
def test_lower_limit_of_python_applies(beside: bytes) -> None:
    with pytest.raises(InvalidJson, match="a number is too large"):
        parse_strict_json(b"[%b, %b]" % (beside, b"9" * 641))


@pytest.mark.parametrize("escape", [b"\\ud83d", b"\\uD83D"])
def test_unpaired_surrogate_is_refused(escape: bytes) -> None:
    assert parse_strict_json(b'"%b\\ude42"' % escape) == "\U0001f642"
    with pytest.raises(InvalidJson, match="unpaired surrogate"):
        parse_strict_json(b'"%b"' % escape)


@pytest.mark.parametrize("text", [b"", b" \n"], ids=["nothing", "spaces"])
def test_empty_text_is_called_empty(text: bytes) -> None:
    with pytest.raises(InvalidJson, match="it is empty"):
        parse_strict_json(text)
