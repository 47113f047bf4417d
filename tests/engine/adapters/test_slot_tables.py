"""The tables of adapters with drafters."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from loramux.adapter_store.formats.packed.packing import PackedAdapter
from loramux.engine.adapters.slot_tables import SlotTables
from loramux.engine.device.accelerator import HostAccelerator
from loramux.kernels.layout import NO_ROWS, LinearShape, RowCounts
from tests.engine.adapters.test_page_copier import FACTORS, TARGET

HEAD_TARGET = replace(TARGET, draft_modules=(LinearShape("draft.q", 64, 64), LinearShape("draft.o", 64, 32)))
SLOT = np.array([0], np.int32)


def packed(rank: int, outer_ranks: list[int], rows: RowCounts = NO_ROWS) -> PackedAdapter:
    ranks = np.full((2, 2), rank, np.int32)
    layout = HEAD_TARGET.layout(ranks, np.array(outer_ranks, np.int32), False, rows)
    outer_scales = np.array([0.5, 0.25, 2, 4], np.float32)
    return PackedAdapter("a", layout, np.ones((2, 2), np.float32), np.zeros(0, np.uint8), outer_scales)


@pytest.fixture
def tables() -> SlotTables:
    return SlotTables(HEAD_TARGET, 2, HostAccelerator(), FACTORS)


def test_the_rank_of_a_drafter_does_not_count_for_the_base(tables: SlotTables) -> None:
    tables.write(0, [0], packed(8, [0, 0, 64, 17]))
    tables.write(1, [1], packed(4, [12, 0, 0, 0]))
    slots = np.array([-1, 0, 1], np.int32)
    assert [tables.max_rank(slots[[row]]) for row in range(3)] == [0, 8, 12]
    assert [tables.max_draft_rank(slots[[row]]) for row in range(3)] == [0, 64, 0]
    assert (tables.max_rank(slots), tables.max_draft_rank(slots)) == (12, 64)
    assert tables.have_drafters(slots) == [False, True, False]


def test_a_drafter_is_beside_outer_modules_and_trained_rows(tables: SlotTables) -> None:
    one = packed(8, [0, 4, 5, 0], RowCounts((2, 3)))
    tables.write(0, [0], one)
    outer, rows, drafter = tables.device.outer, tables.device.trained_rows, tables.device.drafter
    assert outer is not None
    assert rows is not None
    assert drafter is not None
    assert (outer.rank[0, 0].tolist(), drafter.rank[0, 0].tolist()) == ([0, 4], [5, 0])
    assert (outer.scale[0, 0].tolist(), drafter.scale[0, 0].tolist()) == ([1.5, 0.25], [2, 4])
    assert rows.rank[0, 0].tolist() == [2, 3]
    offsets = one.layout.outer_offsets
    np.testing.assert_array_equal(np.concatenate([outer.off[0, 0], drafter.off[0, 0]]), offsets)
    np.testing.assert_array_equal(rows.off[0, 0], one.layout.row_offsets[:2])


def test_a_slot_forgets_the_drafter_of_an_earlier_adapter(tables: SlotTables) -> None:
    assert tables.device.drafter is not None
    tables.write(0, [0], packed(8, [0, 0, 64, 17]))
    tables.write(0, [0], packed(8, [0, 0, 0, 0]))
    assert tables.max_draft_rank(SLOT) == 0
    assert not tables.device.drafter.rank.any()
