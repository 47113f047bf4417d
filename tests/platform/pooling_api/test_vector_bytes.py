"""Vectors as bytes, compared with torch's conversions, which vLLM uses."""

from __future__ import annotations

import sys

import numpy as np
import pytest
import torch

from loramux.platform.pooling_api.vector_bytes import NumberFormat, vector_bytes

DTYPES: dict[NumberFormat, torch.dtype] = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "fp8_e4m3": torch.float8_e4m3fn,
    "fp8_e5m2": torch.float8_e5m2,
}


def decoded(content: bytes, number_format: NumberFormat) -> torch.Tensor:
    return torch.frombuffer(bytearray(content), dtype=DTYPES[number_format]).to(torch.float32)


@pytest.mark.parametrize("number_format", DTYPES)
def test_numbers_are_rounded_like_torchs(number_format: NumberFormat) -> None:
    dtype = DTYPES[number_format]
    largest = torch.finfo(dtype).max
    drawn = np.random.default_rng(0)
    vector = (drawn.normal(size=20_000) * 10.0 ** drawn.uniform(-10, 2, 20_000)).astype(np.float32)
    # Every value of 8 bits, and the numbers halfway between neighbours.
    codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e5m2).to(torch.float32).numpy()
    fine = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).to(torch.float32).numpy()
    exact = np.concatenate([codes[np.isfinite(codes)], fine[np.isfinite(fine)]])
    halfway = (np.sort(exact)[1:] + np.sort(exact)[:-1]) / 2
    vector = np.concatenate([vector, exact, halfway])
    vector = vector[np.abs(vector) <= largest]
    expected = torch.from_numpy(vector).to(dtype)
    assert vector_bytes(vector, number_format, "little") == expected.view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize("number_format", DTYPES)
def test_a_number_beyond_the_range_becomes_the_largest(number_format: NumberFormat) -> None:
    vector = np.array([3.4e38, -3.4e38], np.float32)
    largest = torch.finfo(DTYPES[number_format]).max
    expected = [3.4e38, -3.4e38] if number_format == "float32" else [largest, -largest]
    assert decoded(vector_bytes(vector, number_format, "little"), number_format).tolist() == pytest.approx(expected)


@pytest.mark.parametrize("number_format", ["float32", "float16", "bfloat16"])
def test_the_byte_order_reverses_each_number(number_format: NumberFormat) -> None:
    vector = np.array([1.0, -0.15625, 3e-5], np.float32)
    little, big, native = (vector_bytes(vector, number_format, order) for order in ("little", "big", "native"))
    size = len(little) // 3
    assert big == b"".join(little[begin : begin + size][::-1] for begin in range(0, len(little), size))
    assert native == (little if sys.byteorder == "little" else big)


@pytest.mark.parametrize("number_format", DTYPES)
def test_float64_is_accepted_and_nothing_is_left_of_an_empty_vector(number_format: NumberFormat) -> None:
    assert decoded(vector_bytes(np.array([0.5, -0.0]), number_format, "little"), number_format).tolist() == [0.5, 0.0]
    assert vector_bytes(np.array([], np.float32), number_format, "big") == b""
