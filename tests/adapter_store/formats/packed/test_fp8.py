from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from loramux.adapter_store.errors import AdapterRejected
from loramux.adapter_store.formats.packed.canonical import write_canonical
from loramux.adapter_store.formats.packed.fp8 import LARGEST, to_fp8, to_fp8_factors
from loramux.adapter_store.formats.packed.pack_target import FP8, PackTarget
from loramux.adapter_store.formats.packed.packed_file import write_packed
from loramux.adapter_store.formats.packed.packing import pack
from loramux.adapter_store.validation.validation import validate_files
from loramux.kernels.layout import row_layout
from loramux.kernels.quantized import E4M3
from tests.adapter_store.packed_files import read_packed
from tests.adapter_store.small_base import OUTER_MODULES, make_target


def in_fp8(target: PackTarget) -> PackTarget:
    return replace(target, dtype=FP8, geometry=replace(target.geometry, adapter_itemsize=1))


def canonical_of(files: Any, target: PackTarget, path: Path) -> Path:
    report = validate_files(files.config_bytes, files.tensor_bytes, target)
    write_canonical(files.tensor_bytes, report.scales, path)
    return path


def product(A: np.ndarray, B: np.ndarray) -> np.ndarray:
    return A.astype(np.float64).T @ B.astype(np.float64)


def test_codes_equal_those_of_torch() -> None:
    """All codes, all midpoints between them, and random values of every size."""
    values = E4M3[:127].astype(np.float64)
    rng = np.random.default_rng(0)
    random = np.ldexp(rng.uniform(-1, 1, 20_000), rng.integers(-12, 9, 20_000))
    inputs = np.concatenate([values, (values[1:] + values[:-1]) / 2, random]).clip(-LARGEST, LARGEST)
    inputs = np.concatenate([inputs, -inputs]).astype(np.float32)
    expected = torch.from_numpy(inputs).to(torch.float8_e4m3fn).view(torch.uint8).numpy()
    np.testing.assert_array_equal(to_fp8(inputs.astype(np.float64)), expected)


def random_factors(spread_of_A: np.ndarray, spread_of_B: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(1)
    A, B = rng.standard_normal((2, 5, 63))
    return (A * spread_of_A).astype(np.float32), (B * spread_of_B).astype(np.float32)


COLUMN = np.ones((5, 1))
UNEVEN = np.array([1e4, 1, 1, 1e-4, 0])[:, None]


@pytest.mark.parametrize(
    ("spread_of_A", "spread_of_B"),
    [
        pytest.param(COLUMN, COLUMN, id="ordinary"),
        pytest.param(COLUMN * 1e30, COLUMN * 1e30, id="huge"),
        pytest.param(COLUMN * 1e-30, COLUMN * 1e25, id="tiny-times-huge"),
        pytest.param(COLUMN * 1e-41, COLUMN, id="subnormal"),
        pytest.param(UNEVEN, COLUMN, id="uneven-A"),
        pytest.param(UNEVEN, 1 / (UNEVEN + 1e-4), id="uneven-A-and-B"),
        pytest.param(COLUMN, np.zeros((1, 1)), id="zero-B"),
    ],
)
def test_each_element_is_within_its_bound(spread_of_A: np.ndarray, spread_of_B: np.ndarray) -> None:
    A, B = random_factors(spread_of_A, spread_of_B)
    found = to_fp8_factors(A, B)
    # Row r of A has been divided by a power of two, and row r of B multiplied by it. Without an A, B is unused.
    largest = np.abs(A).max(axis=1, keepdims=True).astype(np.float64)
    powers = np.exp2(np.ceil(np.log2(np.where(largest > 0, largest, LARGEST) / LARGEST)))
    used_B = np.where(largest > 0, B.astype(np.float64) * powers / found.factor, 0)
    for codes, exact in ((found.A, A / powers), (found.B, used_B)):
        rounded, exact = E4M3[codes].astype(np.float64), exact.astype(np.float64)
        assert np.abs(exact).max() <= LARGEST
        assert (np.abs(rounded - exact) <= np.maximum(np.abs(exact) * 2.0**-4, 2.0**-10)).all()
    # Both factors of a product have a relative error of at most 2**-4, or a negligible absolute one.
    total = product(np.abs(A), np.abs(B))
    error = np.abs(product(E4M3[found.A], E4M3[found.B]) * found.factor - product(A, B))
    assert (error <= ((1 + 2.0**-4) ** 2 - 1) * total + 5 * 2.0**-16 * total.max()).all()


def test_fp8_uploads_are_kept_exactly() -> None:
    """Values that a trainer has rounded to FP8 with one scale are not rounded again."""
    rng = np.random.default_rng(2)
    normal = np.flatnonzero(np.abs(E4M3[:128]) >= 1)
    A, B = (E4M3[rng.choice(normal, (4, 64))] * np.float32(2.0**-7) for _ in range(2))
    A[:, 0] = B[:, 0] = LARGEST * np.float32(2.0**-7)
    found = to_fp8_factors(A, B)
    np.testing.assert_array_equal(product(E4M3[found.A], E4M3[found.B]) * found.factor, product(A, B))


@pytest.mark.parametrize("rank", [1, 3, 16])
def test_packed_codes_are_those_of_each_module(adapter_maker: Any, tmp_path: Path, rank: int) -> None:
    target = in_fp8(make_target(outer_modules=OUTER_MODULES))
    files = adapter_maker(target)(rank=rank, modules=("self_attn.q_proj", "mlp.down_proj", "model.embed_tokens"))
    packed = pack(canonical_of(files, target, tmp_path / "c"), target)
    assert packed.payload.shape == (packed.num_pages, 2, target.geometry.page_bytes)
    num_nonzero = 0
    for layer in (None, 0, 1):
        is_outer = layer is None
        geometry = target.geometry.flat if is_outer else target.geometry
        pages = packed.payload[: packed.layout.num_outer_pages] if is_outer else packed.payload[:, layer]
        stream = pages.reshape(-1)
        for m, shape in enumerate(target.outer_modules if is_outer else target.modules):
            found_rank, offsets = packed.layout.rank_and_offsets(layer, m)
            prefix = f"base_model.model.{shape.name}."
            if not is_outer:
                prefix = f"base_model.model.model.layers.{layer}.{shape.name}."
            suffix = "lora_embedding_" if shape.is_embedding else "lora_"
            names = sorted(name for name in files.tensors if name.startswith(prefix + suffix))
            assert found_rank == (rank if names else 0)
            if not names:
                continue
            A, B = (files.tensors[name] for name in names)
            expected = to_fp8_factors(A, B.T)
            scale = packed.outer_scales[m] if is_outer else packed.scales[layer, m]
            assert scale == np.float32(2.0 * expected.factor)
            for half, codes in enumerate((expected.A.T if shape.is_embedding else expected.A, expected.B)):
                padded = row_layout(codes.shape[1], geometry.adapter_elements).padded_len
                if shape.is_embedding and half == 0:
                    padded = rank
                found = stream[offsets[half] : offsets[half] + len(codes) * padded].reshape(len(codes), padded)
                np.testing.assert_array_equal(found[:, : codes.shape[1]], codes)
                num_nonzero += np.count_nonzero(codes)
    assert np.count_nonzero(packed.payload) == num_nonzero


def test_a_packed_file_keeps_codes_and_scales(adapter_maker: Any, tmp_path: Path) -> None:
    target = in_fp8(make_target())
    canonical = canonical_of(adapter_maker(target)(rank=4), target, tmp_path / "c")
    packed = pack(canonical, target)
    write_packed(tmp_path / "first", packed, target)
    write_packed(tmp_path / "second", pack(canonical, target), target)
    assert (tmp_path / "first").read_bytes() == (tmp_path / "second").read_bytes()
    read = read_packed(tmp_path / "first", target, packed.digest)
    np.testing.assert_array_equal(read.payload, packed.payload)
    np.testing.assert_array_equal(read.scales, packed.scales)
    assert len({one.pack_key for one in (target, make_target(), make_target("bfloat16"))}) == 3


def test_fp8_halves_the_pages(adapter_maker: Any, tmp_path: Path) -> None:
    wide = make_target("bfloat16")
    canonical = canonical_of(adapter_maker(wide)(rank=32), wide, tmp_path / "c")
    assert pack(canonical, in_fp8(wide)).num_pages * 2 in range(
        pack(canonical, wide).num_pages, pack(canonical, wide).num_pages + 2
    )


@pytest.mark.parametrize(
    "features",
    [
        {"lora_bias": True},
        {"use_dora": True},
    ],
    ids=["bias", "DoRA"],
)
def test_validation_refuses_what_codes_cannot_represent(adapter_maker: Any, features: dict[str, bool]) -> None:
    target = in_fp8(make_target())
    files = adapter_maker(target)(rank=4, **features)
    with pytest.raises(AdapterRejected, match="stores adapters as FP8 codes"):
        validate_files(files.config_bytes, files.tensor_bytes, target)
    validate_files(files.config_bytes, files.tensor_bytes, make_target())


def test_stored_trained_vectors_are_refused(adapter_maker: Any, tmp_path: Path) -> None:
    target, wide = in_fp8(make_target()), make_target()
    canonical = canonical_of(adapter_maker(wide)(rank=4, lora_bias=True), wide, tmp_path / "c")
    with pytest.raises(AdapterRejected, match="stores adapters as FP8 codes"):
        pack(canonical, target)
