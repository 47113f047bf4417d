from __future__ import annotations

import re
from itertools import count
from types import SimpleNamespace
from uuid import UUID

import pytest

from loramux.migrations import identifiers
from loramux.migrations.identifiers import new_id


def test_identifiers_sort_in_the_order_in_which_a_process_makes_them(monkeypatch: pytest.MonkeyPatch) -> None:
    times_ns = count(1_800_000_000_000_000_000, 250)
    monkeypatch.setattr(identifiers, "time", SimpleNamespace(time_ns=lambda: next(times_ns)))
    made = [new_id("ten") for _ in range(10_000)]
    assert made == sorted(made)


def test_an_identifier_is_a_prefix_and_a_uuid_of_the_present() -> None:
    one, other = new_id("ten"), new_id("ten")
    assert one != other
    assert re.fullmatch("ten_[0-9a-f]{32}", one)
    made = UUID(one.removeprefix("ten_"))
    assert (made.version, made.variant) == (7, UUID(int=1 << 63).variant)
