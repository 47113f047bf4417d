from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from loramux.adapter_store.errors import AdapterCorrupt
from loramux.adapter_store.formats.files.float_formats import to_float32
from loramux.adapter_store.formats.packed.canonical import write_canonical
from loramux.adapter_store.formats.packed.pack_target import PackTarget
from loramux.adapter_store.formats.packed.packed_file import read_packed, write_packed
from loramux.adapter_store.formats.packed.packing import PackedAdapter, pack
from loramux.adapter_store.validation.validation import validate_files
from loramux.kernels.layout import A, LinearShape, PageGeometry, part_layout
from tests.adapter_store.blobs.watched_blobs import WatchedBlobStore
from tests.adapter_store.linears import fused_linears, llama_linears, outer_linears
from tests.adapter_store.tiers.open_source import fetch, open_source

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, INTERMEDIATE, VOCAB_SIZE = 32, 8, 4, 8, 56, 72
QUERIES, KEYS = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM

PLAIN = llama_linears(HIDDEN, QUERIES, KEYS, INTERMEDIATE)
FUSED = fused_linears(HIDDEN, QUERIES, KEYS, INTERMEDIATE)
OUTER = outer_linears(VOCAB_SIZE, HIDDEN)

# Include fused modules, which are split part by part, and modules split along their inputs.
FUSED_PARTS = {"qkv_proj": (QUERIES, KEYS, KEYS), "gate_up_proj": (INTERMEDIATE, INTERMEDIATE)}
SUMMED = ("o_proj", "down_proj", "embed_tokens")


def sharded(modules: tuple[LinearShape, ...], tp_size: int, tp_rank: int, dtype: str = "float32") -> PackTarget:
    itemsize = 4 if dtype == "float32" else 2
    geometry = PageGeometry(2, KV_HEADS // tp_size, HEAD_DIM, itemsize, itemsize)
    return PackTarget(modules, geometry, dtype, OUTER, tp_size, tp_rank)


def canonical_of(files: Any, target: PackTarget, path: Path) -> Path:
    report = validate_files(files.config_bytes, files.tensor_bytes, target)
    write_canonical(files.tensor_bytes, report.scales, path)
    return path


def weights_of(packed: PackedAdapter, target: PackTarget, layer: int | None, m: int) -> list[npt.NDArray[np.float32]]:
    """`A` `[rank, in]`, `B` `[out, rank]` and the affine `[out, 2]` of one module, read as the layout documents."""
    outer = layer is None
    whole = (target.outer_modules if outer else target.modules)[m]
    shape = target.shard(whole).shape(whole)
    geometry = target.geometry.flat if outer else target.geometry
    pages = packed.payload.view(target.storage_dtype)
    stream = (pages[: packed.layout.num_outer_pages] if outer else pages[:, layer]).reshape(-1)
    rank, offsets = packed.layout.rank_and_offsets(layer, m)
    found = []
    for half in packed.layout.parts:
        part = part_layout(shape, half, rank, geometry.adapter_elements)
        rows = stream[offsets[half] : offsets[half] + part.num_elements].reshape(part.num_rows, -1)
        rows = rows[:, : part.row.row_len]
        rows = rows if target.dtype == "float32" else to_float32(rows, "BF16")
        found.append(rows.T if half != A or shape.is_embedding else rows)
    return found


def changes(packed: PackedAdapter, target: PackTarget, layer: int | None, m: int, x: Any) -> Any:
    """The change to a base output of 1: `y + gain y + shift - 1` with `y = 1 + scale B (A x)`; `x` is `[in]`."""
    a, b, *affine = weights_of(packed, target, layer, m)
    scale = packed.outer_scales[m] if layer is None else packed.scales[layer, m]
    change = scale * (b @ (a @ x))
    return change + affine[0][:, 0] * (1 + change) + affine[0][:, 1] if affine else change


def own(values: Any, parts: tuple[int, ...], tp_size: int, tp_rank: int) -> Any:
    """Return the rank's slices of all parts of a vector, concatenated."""
    pieces = np.split(values, np.cumsum(parts)[:-1])
    return np.concatenate([np.split(piece, tp_size)[tp_rank] for piece in pieces])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("tp_size", [1, 2, 4])
@pytest.mark.parametrize("modules", [PLAIN, FUSED], ids=["plain", "fused"])
@pytest.mark.parametrize(("rank", "has_bias"), [(1, False), (5, True), (16, False)])
def test_all_ranks_together_compute_the_whole_adapters_result(
    adapter_maker: Any,
    tmp_path: Path,
    modules: tuple[LinearShape, ...],
    tp_size: int,
    rank: int,
    has_bias: bool,
    dtype: str,
) -> None:
    whole_target = sharded(modules, 1, 0, dtype)
    # An embedding's B has no bias.
    names = tuple(shape.name for shape in (*modules, *OUTER) if not (has_bias and shape.is_embedding))
    files = adapter_maker(whole_target)(rank=rank, modules=names, lora_bias=has_bias)
    canonical = canonical_of(files, whole_target, tmp_path / "c")
    whole = pack(canonical, whole_target)
    targets = [sharded(modules, tp_size, tp_rank, dtype) for tp_rank in range(tp_size)]
    shards = [pack(canonical, target) for target in targets]
    assert {shard.digest for shard in shards} == {whole.digest}
    random = np.random.default_rng(rank)
    places = [(None, m) for m in range(len(OUTER))] + [(layer, m) for layer in (0, 1) for m in range(len(modules))]
    for layer, m in places:
        shape = (OUTER if layer is None else modules)[m]
        if shape.name not in names:
            continue
        name = shape.name.rsplit(".", 1)[-1]
        x = random.standard_normal(shape.in_features).astype(np.float32)
        y = changes(whole, whole_target, layer, m, x)
        assert np.abs(y).max() > 0
        if name in SUMMED:
            inputs = [own(x, (shape.in_features,), tp_size, tp_rank) for tp_rank in range(tp_size)]
            found = sum(changes(shards[r], targets[r], layer, m, inputs[r]) for r in range(tp_size))
            np.testing.assert_allclose(found, y, rtol=1e-4, atol=1e-4)
            continue
        parts = FUSED_PARTS.get(name, (shape.out_features,))
        for tp_rank in range(tp_size):
            found = changes(shards[tp_rank], targets[tp_rank], layer, m, x)
            np.testing.assert_allclose(found, own(y, parts, tp_size, tp_rank), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("modules", [PLAIN, FUSED], ids=["plain", "fused"])
def test_each_rank_has_exactly_the_weights_it_needs(
    adapter_maker: Any, tmp_path: Path, modules: tuple[LinearShape, ...]
) -> None:
    names = tuple(shape.name for shape in (*modules, *OUTER))
    files = adapter_maker(sharded(modules, 1, 0))(rank=4, modules=names)
    canonical = canonical_of(files, sharded(modules, 1, 0), tmp_path / "c")
    num_whole = sum(tensor.size for tensor in files.tensors.values())
    num_shared = sum(
        tensor.size
        for name, tensor in files.tensors.items()
        if any(one in name for one in SUMMED) == ("lora_B" in name or "embedding_B" in name)
    )
    num_packed = sum(
        np.count_nonzero(pack(canonical, sharded(modules, 4, tp_rank)).payload.view("<f4")) for tp_rank in range(4)
    )
    assert num_packed == num_whole + 3 * num_shared


def test_each_rank_has_its_own_pack_key(tmp_path: Path, adapter_maker: Any) -> None:
    targets = [sharded(PLAIN, 1, 0), *(sharded(PLAIN, 2, tp_rank) for tp_rank in range(2)), sharded(PLAIN, 4, 0)]
    assert len({target.pack_key for target in targets}) == 4
    assert all(PackTarget.from_document(target.document()) == target for target in targets)
    files = adapter_maker(targets[0])(rank=3)
    packed = pack(canonical_of(files, targets[0], tmp_path / "c"), targets[1])
    write_packed(tmp_path / "p", packed, targets[1])
    np.testing.assert_array_equal(read_packed(tmp_path / "p", targets[1]).payload, packed.payload)
    with pytest.raises(AdapterCorrupt, match="contains adapter"):
        read_packed(tmp_path / "p", targets[2])


def test_single_gpu_pack_key_does_not_depend_on_sharding(target: PackTarget) -> None:
    assert target.pack_key == "bf0df69dc3d9e381"
    document = target.document()
    del document["tp_size"], document["tp_rank"]
    assert PackTarget.from_document(document) == target


def test_rank_rebuilds_its_shard_from_the_canonical_file(
    target: PackTarget, store_adapter: Any, tmp_path: Path
) -> None:
    blobs = WatchedBlobStore()
    stored = store_adapter(blobs, is_packed=True)
    geometry = replace(target.geometry, num_kv_heads=target.geometry.num_kv_heads // 2)
    for tp_rank in range(2):
        rank = replace(target, geometry=geometry, tp_size=2, tp_rank=tp_rank)
        found = fetch(open_source(blobs, rank, tmp_path), stored.digest)
        wanted = pack(blobs.read_bytes(f"adapters/{stored.digest}.safetensors"), rank)
        np.testing.assert_array_equal(found.payload, wanted.payload)
        assert blobs.exists(f"packed/{stored.digest}/{rank.pack_key}")
    assert blobs.num_gets == {"packed": 2, "adapters": 2}


@pytest.mark.parametrize(
    ("tp_size", "tp_rank", "modules", "message"),
    [
        pytest.param(0, 0, PLAIN, "outside", id="none"),
        pytest.param(2, 2, PLAIN, "outside", id="beyond"),
        pytest.param(2, -1, PLAIN, "outside", id="negative"),
        pytest.param(3, 0, PLAIN, "equal parts", id="not equal"),
        pytest.param(2, 0, (LinearShape("q_proj", 32, 24),), "equal parts", id="half a head"),
        pytest.param(2, 0, (LinearShape("gate_up_proj", 32, 6),), "equal parts", id="odd halves"),
        pytest.param(2, 0, (LinearShape("qkv_proj", 32, 2 * KEYS),), "equal parts", id="no queries"),
        pytest.param(2, 0, (LinearShape("router", 32, 8),), "no tensor-parallel split", id="unknown"),
    ],
)
def test_indivisible_shapes_are_refused(
    tp_size: int, tp_rank: int, modules: tuple[LinearShape, ...], message: str
) -> None:
    geometry = PageGeometry(2, 2, HEAD_DIM, 4, 4)
    with pytest.raises(ValueError, match=message):
        PackTarget(modules, geometry, "float32", (), tp_size, tp_rank)
