from __future__ import annotations

import math

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


@pytest.mark.parametrize("sign", [b"", b"-"])
def test_integer_of_too_many_digits_is_refused(sign: bytes) -> None:
    with pytest.raises(InvalidJson, match="a number is too large"):
        parse_strict_json(b"[1, " + sign + b"9" * 4301 + b"]")
