from __future__ import annotations

import hashlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from loramux.adapter_store.errors import AdapterCorrupt, AdapterRejected
from loramux.adapter_store.formats.files.float_formats import to_bfloat16_bits, to_float32
from loramux.adapter_store.formats.packed import packed_file
from loramux.adapter_store.formats.packed.canonical import write_canonical
from loramux.adapter_store.formats.packed.pack_target import PackTarget
from loramux.adapter_store.formats.packed.packed_file import write_packed
from loramux.adapter_store.formats.packed.packing import PackedAdapter, pack
from loramux.adapter_store.validation.validation import validate_files
from loramux.kernels.layout import MAX_EXTRA_TOKENS, LinearShape, row_layout
from tests.adapter_store.packed_files import read_packed


def packed_of(files: Any, target: PackTarget, path: Path) -> PackedAdapter:
    report = validate_files(files.config_bytes, files.tensor_bytes, target)
    write_canonical(files.tensor_bytes, report.scales, path)
    return pack(path, target)


def with_header(data: bytes, old: bytes, new: bytes) -> bytes:
    """A packed file with a part of its header replaced. The header's checksum is right."""
    length = int.from_bytes(data[8:12], "little")
    header, payload = data[44 : 44 + length], data[44 + length + -(44 + length) % 4096 :]
    assert old in header
    header = header.replace(old, new, 1)
    start = data[:8] + len(header).to_bytes(4, "little") + hashlib.sha256(header).digest() + header
    return start + bytes(-len(start) % 4096) + payload


def element_by_element(packed: PackedAdapter, target: PackTarget, layer: int, m: int, half: int) -> np.ndarray:
    """The rows of a module's A or B, read element by element with the documented address formula."""
    shape = target.modules[m]
    E = target.geometry.adapter_elements
    row_len = (shape.in_features, shape.out_features)[half]
    rows = row_layout(row_len, E)
    stream = packed.payload.view(target.storage_dtype)
    rank = packed.layout.ranks[layer, m]
    found = np.zeros((rank, row_len), target.storage_dtype)
    for row in range(rank):
        for column in range(row_len):
            chunk, rest = divmod(column, rows.chunk_len)
            start = packed.layout.offsets[layer, m, half] + row * rows.padded_len + chunk * rows.chunk_len
            e = start + rest
            assert start // E == e // E, "a chunk straddles a page"
            found[row, column] = stream[e // E, layer, e % E]
    return found


def stored(weights: np.ndarray, target: PackTarget) -> np.ndarray:
    return weights if target.dtype == "float32" else to_bfloat16_bits(weights)


def assert_packed_as_asked(packed: PackedAdapter, files: Any, target: PackTarget) -> None:
    num_elements = 0
    for layer in range(target.geometry.num_layers):
        for m, shape in enumerate(target.modules):
            name = f"base_model.model.model.layers.{layer}.{shape.name}.lora_"
            A = files.tensors.get(name + "A.weight")
            if A is None:
                assert packed.layout.ranks[layer, m] == 0
                assert packed.scales[layer, m] == 0
                continue
            B = files.tensors[name + "B.weight"]
            assert packed.layout.ranks[layer, m] == len(A)
            np.testing.assert_array_equal(element_by_element(packed, target, layer, m, 0), stored(A, target))
            np.testing.assert_array_equal(element_by_element(packed, target, layer, m, 1), stored(B.T, target))
            num_elements += np.count_nonzero(stored(A, target)) + np.count_nonzero(stored(B, target))
    assert np.count_nonzero(packed.payload.view(target.storage_dtype)) == num_elements


@pytest.mark.parametrize(
    "adapter",
    [
        pytest.param({"rank": 1, "modules": ("self_attn.k_proj",)}, id="smallest"),
        pytest.param({"rank": 3}, id="odd rank"),
        pytest.param({"rank": 4, "layers": (1,), "layers_to_transform": [1]}, id="one layer"),
        pytest.param(
            {"rank": 8, "ranks": lambda layer, module: 1 + 6 * layer + 2 * ("q" in module)}, id="rank by layer"
        ),
        pytest.param({"rank": 16, "modules": ("self_attn.o_proj", "mlp.up_proj", "mlp.down_proj")}, id="wide"),
    ],
)
def test_each_element_is_at_its_documented_address(
    any_target: PackTarget, adapter_maker: Any, tmp_path: Path, adapter: dict[str, Any]
) -> None:
    files = adapter_maker(any_target)(**adapter)
    packed = packed_of(files, any_target, tmp_path / "c")
    assert packed.payload.shape == (packed.num_pages, 2, any_target.geometry.page_bytes)
    assert_packed_as_asked(packed, files, any_target)


def test_odd_rows_are_padded_with_zeros(odd_target: PackTarget, adapter_maker: Any, tmp_path: Path) -> None:
    files = adapter_maker(odd_target)(rank=5, modules=("self_attn.q_proj", "mlp.down_proj"))
    assert_packed_as_asked(packed_of(files, odd_target, tmp_path / "c"), files, odd_target)


@pytest.mark.parametrize("rank", [1, 3, 8, 40])
@pytest.mark.parametrize(
    "modules",
    [
        ("model.embed_tokens",),
        ("lm_head",),
        ("model.embed_tokens", "self_attn.q_proj", "lm_head", "mlp.down_proj"),
    ],
    ids=["embedding", "head", "all"],
)
def test_outer_modules_fill_whole_pages_before_the_layers(
    outer_target: PackTarget, adapter_maker: Any, tmp_path: Path, rank: int, modules: tuple[str, ...]
) -> None:
    files = adapter_maker(outer_target)(rank=rank, modules=modules)
    packed = packed_of(files, outer_target, tmp_path / "c")
    layout, geometry = packed.layout, outer_target.geometry
    stream = packed.payload.view(outer_target.storage_dtype)[: layout.num_outer_pages].reshape(-1)
    num_elements = 0
    for m, shape in enumerate(outer_target.outer_modules):
        suffix = "lora_embedding_" if shape.is_embedding else "lora_"
        names = [name for name in files.tensors if f"{shape.name}.{suffix}" in name]
        assert bool(names) == (shape.name in modules)
        assert layout.outer_ranks[m] == (rank if names else 0)
        assert packed.outer_scales[m] == (2.0 if names else 0.0)
        if not names:
            continue
        A, B = (files.tensors[name] for name in sorted(names))
        for half, rows in enumerate((A.T if shape.is_embedding else A, B.T)):
            padded_len = row_layout(rows.shape[1], geometry.flat.adapter_elements).padded_len
            if shape.is_embedding and half == 0:
                padded_len = rank
            begin = int(layout.outer_offsets[m, half])
            found = stream[begin : begin + len(rows) * padded_len].reshape(len(rows), padded_len)
            np.testing.assert_array_equal(found[:, : rows.shape[1]], stored(rows, outer_target))
            num_elements += rows.size
    assert np.count_nonzero(stream) == num_elements
    # The contents of the layers are unchanged, but start a few pages later.
    inner = tuple(name for name in modules if name.startswith(("self_attn", "mlp")))
    inner_tensors = {name: tensor for name, tensor in files.tensors.items() if ".layers." in name}
    if inner:
        only = adapter_maker(outer_target)(rank=rank, modules=inner)
        only.tensors = inner_tensors
        alone = packed_of(only, outer_target, tmp_path / "alone")
        assert alone.layout.num_outer_pages == 0
        np.testing.assert_array_equal(packed.payload[layout.num_outer_pages :], alone.payload)
        shift = np.where(layout.ranks[..., None] > 0, layout.num_outer_pages * geometry.adapter_elements, 0)
        np.testing.assert_array_equal(layout.offsets[..., :2], alone.layout.offsets[..., :2] + shift)
    assert packed.num_pages == layout.num_outer_pages + (alone.num_pages if inner else 0)


def test_outer_modules_survive_writing_and_reading(
    outer_target: PackTarget, adapter_maker: Any, tmp_path: Path
) -> None:
    files = adapter_maker(outer_target)(rank=5, modules=("lm_head", "model.embed_tokens", "self_attn.v_proj"))
    packed = packed_of(files, outer_target, tmp_path / "c")
    write_packed(tmp_path / "p", packed, outer_target)
    found = read_packed(tmp_path / "p", outer_target, packed.digest)
    np.testing.assert_array_equal(found.payload, packed.payload)
    np.testing.assert_array_equal(found.outer_scales, packed.outer_scales)
    np.testing.assert_array_equal(found.layout.outer_ranks, packed.layout.outer_ranks)
    np.testing.assert_array_equal(found.layout.outer_offsets, packed.layout.outer_offsets)
    np.testing.assert_array_equal(found.layout.offsets, packed.layout.offsets)
    data = bytearray((tmp_path / "p").read_bytes())
    data[4096 + int(packed.layout.outer_offsets[1, 1]) * outer_target.storage_dtype.itemsize] ^= 1
    (tmp_path / "p").write_bytes(data)
    with pytest.raises(AdapterCorrupt, match="pages of the packed file are damaged"):
        read_packed(tmp_path / "p")


def test_largest_adapter_size_includes_outer_modules(outer_target: PackTarget) -> None:
    plain = replace(outer_target, outer_modules=())
    num_outer = 2 * 256 * (70 + 32)
    # Allow for a magnitude per output and for both whole weights, including added tokens.
    num_whole = 2 * (70 + MAX_EXTRA_TOKENS) * 32
    assert outer_target.max_tensors_bytes - plain.max_tensors_bytes == 4 * (num_outer + 70 + 32 + num_whole)
    page_elements = outer_target.geometry.flat.adapter_elements
    assert outer_target.max_pages - plain.max_pages >= num_outer // page_elements


def test_file_in_an_older_format_is_refused(make_adapter: Any, target: PackTarget, tmp_path: Path) -> None:
    """Files in format 3 have other checksums."""
    write_packed(tmp_path / "p", packed_of(make_adapter(), target, tmp_path / "c"), target)
    data = (tmp_path / "p").read_bytes()
    assert data[:8] == b"LMXPACK\x04"
    (tmp_path / "p").write_bytes(b"LMXPACK\x03" + data[8:])
    with pytest.raises(AdapterCorrupt, match="not a packed adapter of this format"):
        read_packed(tmp_path / "p", target)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (b'"digest":"', b'"digest":"\xff'),
        (b'"lane_sums":', b'"more":' + b"[" * 5000 + b',"lane_sums":'),
        (b'"scales":[[', b'"scales":[[1],['),
        (b'"page_tokens":16', b'"page_tokens":0'),
        (b'"ranks":[[', b'"ranks":[[99999999999'),
        (b'"modules":[{', b'"modules":[1,{'),
    ],
    ids=["not UTF-8", "nested", "ragged", "empty pages", "a large rank", "no module"],
)
def test_damaged_header_with_a_right_checksum_is_refused(
    old: bytes, new: bytes, make_adapter: Any, target: PackTarget, tmp_path: Path
) -> None:
    write_packed(tmp_path / "p", packed_of(make_adapter(), target, tmp_path / "c"), target)
    (tmp_path / "p").write_bytes(with_header((tmp_path / "p").read_bytes(), old, new))
    with pytest.raises(AdapterCorrupt):
        read_packed(tmp_path / "p", target)


def test_header_of_more_than_4_mib_is_refused(make_adapter: Any, target: PackTarget, tmp_path: Path) -> None:
    write_packed(tmp_path / "p", packed_of(make_adapter(), target, tmp_path / "c"), target)
    (tmp_path / "p").write_bytes(with_header((tmp_path / "p").read_bytes(), b"{", b"{" + b" " * (4 << 20)))
    with pytest.raises(AdapterCorrupt, match="not a packed adapter of this format"):
        read_packed(tmp_path / "p", target)


def test_scales_and_digest_match_the_canonical_file(make_adapter: Any, target: PackTarget, tmp_path: Path) -> None:
    files = make_adapter(rank=3, use_rslora=True)
    packed = packed_of(files, target, tmp_path / "c")
    assert packed.scales.dtype == np.float32
    assert packed.scales[0, 0] == np.float32(6 / np.sqrt(3))
    assert packed.digest == hashlib.sha256((tmp_path / "c").read_bytes()).hexdigest()
    assert packed.digest == pack((tmp_path / "c").read_bytes(), target).digest


def test_adapter_for_another_base_is_refused(make_adapter: Any, target: PackTarget, tmp_path: Path) -> None:
    packed_of(make_adapter(), target, tmp_path / "c")
    wider = (LinearShape("self_attn.q_proj", 64, 64), *target.modules[1:])
    fewer_layers = replace(target.geometry, num_layers=1)
    others = (
        replace(target, modules=wider),
        replace(target, modules=target.modules[1:]),
        replace(target, geometry=fewer_layers),
    )
    for other in others:
        with pytest.raises(AdapterRejected) as refused:
            pack(tmp_path / "c", other)
        assert refused.value.code == "base_mismatch"


def test_bfloat16_rounds_to_nearest_even_like_torch() -> None:
    import torch

    bits = np.random.default_rng(0).integers(0, 2**32, 200_000, dtype=np.uint32)
    # Ties and neighbouring values reveal wrong rounding.
    ties = (np.arange(2048, dtype=np.uint32)[:, None] << 16) + np.array([0x7FFF, 0x8000, 0x8001], np.uint32)
    values = np.concatenate([bits, ties.reshape(-1)]).view(np.float32)
    values = values[np.isfinite(values) & (np.abs(values) < 1e38)]
    wanted = torch.from_numpy(values.copy()).to(torch.bfloat16).view(torch.uint16).numpy()
    np.testing.assert_array_equal(to_bfloat16_bits(values), wanted)
    np.testing.assert_array_equal(to_bfloat16_bits(to_float32(wanted, "BF16")), wanted)


def in_one_layer(target: PackTarget) -> PackTarget:
    """The same base, but only layer 1 has an `mlp.down_proj`."""
    modules = [replace(one, layers=(1,)) if one.name == "mlp.down_proj" else one for one in target.modules]
    return replace(target, modules=tuple(modules))


def test_pages_are_reserved_only_for_layers_that_have_a_module(target: PackTarget) -> None:
    absent = replace(target, modules=tuple(replace(module, layers=()) for module in target.modules))
    assert absent.max_pages == 0
    assert in_one_layer(target).max_pages == target.max_pages


def test_the_pack_key_of_a_layout_does_not_change(target: PackTarget) -> None:
    """Stores contain packed files of earlier versions."""
    assert target.pack_key == "e6415b7c9c139663"
    document = target.document()
    del document["tp_size"], document["tp_rank"]
    assert PackTarget.from_document(document) == target


def test_different_layouts_have_different_pack_keys(target: PackTarget, odd_target: PackTarget) -> None:
    geometry = replace(target.geometry, kv_itemsize=2)
    keys = {
        target.pack_key,
        odd_target.pack_key,
        replace(target, geometry=geometry).pack_key,
        replace(target, dtype="bfloat16", geometry=replace(target.geometry, adapter_itemsize=2)).pack_key,
        in_one_layer(target).pack_key,
    }
    assert len(keys) == 5
    assert all(PackTarget.from_document(one.document()) == one for one in (target, in_one_layer(target)))
    assert "layers" not in target.document()["modules"][0]
    with pytest.raises(ValueError, match="do not fit"):
        replace(target, dtype="bfloat16")


def test_packed_file_is_read_back_unchanged(any_target: PackTarget, adapter_maker: Any, tmp_path: Path) -> None:
    packed = packed_of(adapter_maker(any_target)(rank=3, use_rslora=True), any_target, tmp_path / "c")
    write_packed(tmp_path / "p", packed, any_target)
    found = read_packed(tmp_path / "p", any_target, packed.digest)
    assert found.digest == packed.digest
    for name in ("payload", "scales"):
        np.testing.assert_array_equal(getattr(found, name), getattr(packed, name))
        assert getattr(found, name).dtype == getattr(packed, name).dtype
    np.testing.assert_array_equal(found.layout.offsets, packed.layout.offsets)
    assert read_packed(tmp_path / "p").num_pages == packed.num_pages


@pytest.mark.parametrize("first_read_bytes", [packed_file.FIRST_READ_BYTES, 100], ids=["at once", "in two reads"])
def test_any_wrong_byte_is_detected(
    first_read_bytes: int, make_adapter: Any, target: PackTarget, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packed_file, "FIRST_READ_BYTES", first_read_bytes)
    path = tmp_path / "p"
    write_packed(path, packed_of(make_adapter(rank=2), target, tmp_path / "c"), target)
    data = path.read_bytes()
    assert read_packed(path).payload.tobytes() == data[4096:]
    header_end = 44 + int.from_bytes(data[8:12], "little")
    positions = [*range(0, header_end, 29), header_end - 1, *range(4096, len(data), 501), len(data) - 1]
    for position in positions:
        path.write_bytes(data[:position] + bytes([data[position] ^ 1]) + data[position + 1 :])
        with pytest.raises(AdapterCorrupt):
            read_packed(path)
    for cut in (b"", data[:10], data[:50], data[:4096], data[:-1], data + b"\0"):
        path.write_bytes(cut)
        with pytest.raises(AdapterCorrupt):
            read_packed(path)


def test_another_adapters_file_is_refused(make_adapter: Any, target: PackTarget, tmp_path: Path) -> None:
    packed = packed_of(make_adapter(), target, tmp_path / "c")
    write_packed(tmp_path / "p", packed, target)
    with pytest.raises(AdapterCorrupt, match="contains adapter"):
        read_packed(tmp_path / "p", digest="0" * 64)
    other = replace(target, geometry=replace(target.geometry, page_tokens=32))
    with pytest.raises(AdapterCorrupt, match="contains adapter"):
        read_packed(tmp_path / "p", other)
