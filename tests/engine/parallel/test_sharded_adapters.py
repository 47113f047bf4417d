from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from loramux.adapter_store.formats.packed.pack_target import PackTarget
from loramux.adapter_store.formats.packed.packing import PackedAdapter, rows_of_part
from loramux.engine.architectures.model_config import ModelConfig
from loramux.engine.loop.config import pack_target
from loramux.engine.parallel.sharded_adapters import AdapterDivider
from loramux.engine.parallel.sharding import module_shards, worker_config
from loramux.kernels.layout import AFFINE, A, RowCounts
from tests.engine.parallel.test_sharding import GPT_OSS, LLAMA, PHI3, QWEN2_MOE

VOCAB_SIZE = 40
TRAINED = RowCounts((3, 5))


def filled(target: PackTarget, dice: np.random.Generator) -> PackedAdapter:
    """An adapter with an affine and random numbers in each part, and absent modules in layer 1."""
    num_layers, num_modules = target.geometry.num_layers, len(target.all_modules)
    ranks = dice.integers(1, 6, (num_layers, num_modules)).astype(np.int32)
    ranks[1, ::2] = 0
    layout = target.layout(ranks, np.array([2, 3], np.int32), True, TRAINED)
    shape = (layout.num_pages, num_layers, target.geometry.page_bytes)
    payload = np.zeros(shape, np.uint8)
    pages = payload.view(target.storage_dtype)
    outer = pages[: layout.num_outer_pages].reshape(-1)
    outer[...] = dice.standard_normal(outer.shape)
    for layer in range(num_layers):
        stream = pages[:, layer].reshape(-1).copy()
        for index, module in enumerate(target.all_modules):
            rank, begins = layout.rank_and_offsets(layer, index)
            for part in layout.parts if rank else ():
                rows = rows_of_part(stream, module, part, rank, begins[part], target, layer)
                rows[...] = dice.standard_normal(rows.shape)
        pages[layout.num_outer_pages :, layer] = stream.reshape(layout.num_pages, -1)[layout.num_outer_pages :]
    scales = dice.standard_normal((num_layers, num_modules)).astype(np.float32)
    return PackedAdapter("digest", layout, scales, payload, np.ones(2, np.float32))


def part_of(packed: PackedAdapter, target: PackTarget, layer: int | None, index: int, part: int) -> npt.NDArray[Any]:
    """A part of one module, as the layout documents: `[rank, features]`."""
    pages = packed.payload.view(target.storage_dtype)
    outer = layer is None
    module = (target.outer_modules if outer else target.all_modules)[index]
    stream = (pages[: packed.layout.num_outer_pages] if outer else pages[:, layer]).reshape(-1)
    rank, begins = packed.layout.rank_and_offsets(layer, index)
    return rows_of_part(stream, module, part, rank, begins[part], target, layer)


@pytest.mark.parametrize("family", [{}, PHI3, QWEN2_MOE, GPT_OSS], ids=["llama", "fused", "experts", "stacked experts"])
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_each_worker_gets_its_share_of_each_part(family: dict[str, Any], size: int, dtype: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**LLAMA, **family, "vocab_size": VOCAB_SIZE}))
    model = ModelConfig.load(tmp_path)
    whole, own = pack_target(model, dtype), pack_target(worker_config(model, size), dtype)
    shards = [module_shards(model, size, worker) for worker in range(size)]
    packed = filled(whole, np.random.default_rng(3))
    divider = AdapterDivider(whole, own, shards)
    shares = divider.shares_of(packed)
    assert {one.num_pages for one in shares} == {divider.num_pages(packed)}
    for worker, share in enumerate(shares):
        assert share.payload.shape == (share.num_pages, 2, own.geometry.page_bytes)
        np.testing.assert_array_equal(share.scales, packed.scales)
        for layer in range(2):
            for index, shard in enumerate(shards[worker]):
                for part in packed.layout.parts if packed.layout.ranks[layer, index] else ():
                    columns = [i for one in (shard.inputs if part == A else shard.outputs) for i in one]
                    expected = part_of(packed, whole, layer, index, part)[:, columns].copy()
                    if part == AFFINE and shard.is_summed and worker > 0:
                        expected[1] = 0
                    np.testing.assert_array_equal(part_of(share, own, layer, index, part), expected)
        for index, module in enumerate(whole.outer_modules):
            for part in packed.layout.parts:
                expected = part_of(packed, whole, None, index, part)
                np.testing.assert_array_equal(part_of(share, own, None, index, part), expected)
            rows = [
                one.payload.reshape(-1)[span.start : span.stop]
                for one, span in (
                    (packed, packed.layout.row_span(index, module, whole.geometry)),
                    (share, share.layout.row_span(index, module, own.geometry)),
                )
            ]
            assert len(rows[0]) > 0
            np.testing.assert_array_equal(*rows)
