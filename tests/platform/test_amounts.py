from __future__ import annotations

import pytest

from loramux.platform.amounts import amount_of, amount_text, decimal, field_name, field_text


@pytest.mark.parametrize(
    ("text", "unit", "amount"),
    [
        ("5", "nanos", 5_000_000_000),
        ("0.000000001", "nanos", 1),
        (" 1,500.25 ", "nanos", 1_500_250_000_000),
        ("1048576", "bytes", 1 << 20),
        ("1.5 GiB", "bytes", 3 << 29),
        ("512B", "bytes", 512),
        ("10,000", "tokens", 10_000),
    ],
)
def test_amounts_are_read_as_people_write_them(text: str, unit: str, amount: int) -> None:
    assert amount_of(text, unit) == amount
    assert amount_of(amount_text(amount, unit), unit) == amount


@pytest.mark.parametrize(
    ("text", "unit"),
    [
        ("0.0000000001", "nanos"),
        # A decimal comma: reading it as a thousands separator would change the amount by a factor of ten.
        ("1,5", "nanos"),
        ("1,5", "tokens"),
        ("-1", "nanos"),
        ("1e3", "nanos"),
        ("NaN", "nanos"),
        ("\u0665", "nanos"),
        ("9" * 5000, "nanos"),
        ("5 GB", "bytes"),
        ("5 GiB", "tokens"),
        ("2.5", "tokens"),
        ("", "nanos"),
    ],
)
def test_ambiguous_or_impossible_amounts_are_refused(text: str, unit: str) -> None:
    with pytest.raises(ValueError, match="an amount of"):
        amount_of(text, unit)


@pytest.mark.parametrize("text", ["-1", "1" + "0" * 18])
def test_refusal_of_a_whole_number_says_what_is_wrong_with_it(text: str) -> None:
    with pytest.raises(ValueError, match="with at most 18 digits and no sign"):
        amount_of(text, "tokens")


def test_money_is_exact_in_texts() -> None:
    texts = [amount_text(nanos, "nanos") for nanos in (0, 5, 5 * 10**9, 1_234_500_000_000, -(10**9) // 4)]
    assert texts == ["0.00", "0.000000005", "5.00", "1,234.50", "-0.25"]
    assert (decimal(5 * 10**9), decimal(-1)) == ("5.000000000", "-0.000000001")


def test_a_fields_unit_is_in_its_name() -> None:
    shown = {
        field_name(name): field_text(value, name)
        for name, value in {
            "limit_nanos": 5 * 10**9,
            "limit_bytes": 2**20,
            "expires_us": 86_400_000_000,
            "mode": "hard",
            "burst_nanos": None,
            "created_us": 2**62,
            "state_us": "text",
        }.items()
    }
    assert shown == {
        "limit": "1.0 MiB",
        "expires": "1970-01-02 00:00:00 UTC",
        "mode": "hard",
        "burst": None,
        "created": 2**62,
        "state": "text",
    }
