from __future__ import annotations

import pytest

from loramux.admin.console.formats import compact, money


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (None, "–"),
        (0, "0"),
        (9_999, "9,999"),
        (12_345, "12.3k"),
        (999_400, "999k"),
        (999_600, "1M"),
        (4_560_000, "4.56M"),
        (999_600_000, "1G"),
        (10**12, "1T"),
        (10**16, "10,000T"),
        (-999_600, "-1M"),
    ],
)
def test_numbers_are_abbreviated(value: int | None, shown: str) -> None:
    assert compact(value) == shown


@pytest.mark.parametrize(
    ("nanos", "shown"),
    [
        (None, "–"),
        (0, "0.00"),
        (450, "0.00000045"),
        (1, "0.000000001"),
        (50_000_000, "0.05"),
        (150_000_000, "0.15"),
        (1_234_567_890_000, "1,234.57"),
        (-450, "-0.00000045"),
    ],
)
def test_small_amounts_of_money_are_exact(nanos: int | None, shown: str) -> None:
    assert money(nanos) == shown
