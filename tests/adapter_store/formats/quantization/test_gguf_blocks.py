"""Blocks have exactly the values that the `gguf` package gives them."""

from __future__ import annotations

import mmap
from pathlib import Path

import numpy as np
import pytest
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, quants

from loramux.adapter_store.formats.files.mapped_tensors import MappedTensor
from loramux.adapter_store.formats.quantization import gguf_blocks
from loramux.adapter_store.formats.quantization.gguf import GgufFormat
from loramux.adapter_store.formats.quantization.gguf_blocks import BLOCK_TYPES, read_blocks, stored_bytes
from loramux.adapter_store.formats.quantization.parts import Parts

HALVES = {
    "Q4_0": (0,),
    "Q4_1": (0, 2),
    "Q5_0": (0,),
    "Q5_1": (0, 2),
    "Q8_0": (0,),
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
    "Q6_K": (208,),
    "IQ4_NL": (0,),
    "IQ4_XS": (0,),
    "MXFP4": (),
}
"""The places of the float16 values in a block."""

ROWS, COLUMNS = 6, 768


def random_blocks(dtype: str, seed: int = 0) -> np.ndarray[tuple[int, ...], np.dtype[np.uint8]]:
    generator = np.random.default_rng(seed)
    block = BLOCK_TYPES[dtype]
    data = generator.integers(0, 256, (ROWS, COLUMNS // block.size, block.num_bytes), dtype=np.uint8)
    for place in HALVES[dtype]:
        halves = generator.normal(size=(*data.shape[:2], 1)).astype(np.float16)
        data[..., place : place + 2] = halves.view(np.uint8)
    if dtype == "MXFP4":
        data[..., 0] = generator.integers(0, 250, data.shape[:2])
    return data.reshape(ROWS, -1)


def test_the_types_have_the_sizes_of_the_gguf_package() -> None:
    assert HALVES.keys() == BLOCK_TYPES.keys()
    for dtype, block in BLOCK_TYPES.items():
        assert GGML_QUANT_SIZES[GGMLQuantizationType[dtype]] == (block.size, block.num_bytes)


@pytest.mark.parametrize("dtype", BLOCK_TYPES)
@pytest.mark.parametrize("chunk", [1 << 22, 1000])
def test_every_value_is_equal(dtype: str, chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gguf_blocks, "_CHUNK_ELEMENTS", chunk)
    stored = random_blocks(dtype)
    weight = read_blocks(dtype, stored.reshape(-1), ROWS, COLUMNS)
    expected = quants.dequantize(stored, GGMLQuantizationType[dtype])
    assert weight.shape == (ROWS, COLUMNS)
    np.testing.assert_array_equal(weight.dequantize(), expected)
    assert np.abs(expected).max() > 0


@pytest.mark.parametrize("dtype", [dtype for dtype in BLOCK_TYPES if dtype != "MXFP4"])
@pytest.mark.parametrize("value", [np.inf, np.nan])
def test_a_scale_that_is_not_finite_is_refused(dtype: str, value: float) -> None:
    for place in HALVES[dtype]:
        stored = random_blocks(dtype)
        stored[3, place : place + 2] = np.array([value], np.float16).view(np.uint8)
        with pytest.raises(ValueError, match="a scale that is not finite"):
            read_blocks(dtype, stored.reshape(-1), ROWS, COLUMNS)


def test_an_exponent_that_is_not_finite_is_refused() -> None:
    stored = random_blocks("MXFP4")
    stored[0, 0] = 255
    with pytest.raises(ValueError, match="a scale that is not finite"):
        read_blocks("MXFP4", stored.reshape(-1), ROWS, COLUMNS)


def mapped(path: Path, stored: np.ndarray[tuple[int, ...], np.dtype[np.uint8]], dtype: str, heads: int) -> MappedTensor:
    path.write_bytes(b"\7" * 5 + stored.tobytes())
    with path.open("rb") as file:
        data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    end = 5 + stored_bytes(dtype, (ROWS, COLUMNS))
    return MappedTensor(path, data, 5, end, dtype, (ROWS, COLUMNS), heads)


@pytest.mark.parametrize("dtype", ["Q4_K", "F16"])
def test_rows_of_paired_heads_are_put_back(dtype: str, tmp_path: Path) -> None:
    """Heads of 2 channels have the same order in both forms. With one head of 6, the file's even rows come first."""
    if dtype == "F16":
        values = np.arange(ROWS * COLUMNS, dtype=np.float16).reshape(ROWS, COLUMNS) / 8
        stored = values.view(np.uint8)
    else:
        stored = random_blocks(dtype)
        values = quants.dequantize(stored, GGMLQuantizationType[dtype])
    for heads, order in ((3, [0, 1, 2, 3, 4, 5]), (1, [0, 2, 4, 1, 3, 5])):
        tensor = mapped(tmp_path / f"{heads}", stored, dtype, heads)
        if dtype == "F16":
            np.testing.assert_array_equal(tensor.float_rows(1, 5), values[order][1:5])
            np.testing.assert_array_equal(tensor.array(), values[order])
        else:
            weight = GgufFormat(("Q4_K",)).read(Parts("module", {".weight": tensor}))
            np.testing.assert_array_equal(weight.dequantize(), values[order])
