"""Products with quantised weights, compared with products with the weights that `dequantize` returns."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn import functional

from loramux.kernels.cpu.instructions.capability import byte_products, integer_products
from loramux.kernels.cpu.instructions.integer_blocks import HAS_BYTE_TABLES, HAS_VNNI, IS_SUPPORTED, MAX_ROWS
from loramux.kernels.cpu.instructions.vectors import WIDTH
from loramux.kernels.cpu.linear import quantized_linear
from loramux.kernels.cpu.linear.code_groups import groups_of
from loramux.kernels.cpu.linear.quantized_layout import pack_codes
from loramux.kernels.cpu.linear.quantized_linear import ROWS_WITHOUT_TILES, QuantizedLinear, make_quantized_linear
from loramux.kernels.cpu.linear.unpacked_codes import UNPACK_ROWS
from loramux.kernels.quantized import INT4, INT8, UINT4, UINT8, QuantizedWeight
from loramux.kernels.reference.quantized import multiply_codes, round_to_bytes
from tests.kernels.cpu.codebooks import CODEBOOKS, FP8, NF4, Shift, random_weight
from tests.kernels.cpu.instruction_sets import INSTRUCTION_SETS, imitate, run_python, runs_here

pytestmark = pytest.mark.skipif(not IS_SUPPORTED, reason="this CPU has no kernels for quantised weights")

PLAIN_CODEBOOKS = ["int4", "uint4-zeros", "uint4-minima", "uint4-halves"]
"""The codebooks of 4 bits with consecutive integers."""

BYTE_CODEBOOKS = [name for name in CODEBOOKS if name != "nf4"] if HAS_VNNI else PLAIN_CODEBOOKS * HAS_BYTE_TABLES
"""The codebooks that this CPU can multiply by activations of 8 bits."""

needs_bytes = pytest.mark.skipif(not BYTE_CODEBOOKS, reason="this CPU multiplies no weights by activations of 8 bits")
needs_vnni = pytest.mark.skipif(not HAS_VNNI, reason="this CPU has no VNNI")
SHAPES = [(64, 128, 32), (100, 256, 256), (33, 640, 64), (96, 512, 128), (70, 130, 130), (40, 96, 48), (1, 2, 2)]
"""Outputs, inputs and inputs per group. Some do not fill whole panels or blocks."""


def multiply(weight: QuantizedWeight, bias: torch.Tensor | None = None) -> QuantizedLinear:
    linear = make_quantized_linear(weight, bias)
    assert linear is not None
    return linear


def shifts_of(weight: QuantizedWeight) -> torch.Tensor:
    """The largest magnitude that is added to the scaled code of each weight and subtracted again."""
    groups = groups_of(weight)
    assert groups is not None
    if groups.minima is None:
        return torch.zeros(weight.shape, dtype=torch.float64)
    return torch.from_numpy(np.abs(groups.minima.astype(np.float64))).repeat_interleave(weight.group, 1)


def largest_error(weight: QuantizedWeight, x: torch.Tensor) -> torch.Tensor:
    """Bound on the error of each output: from rounding `x`, from rounding the codebook, and from float32 sums."""
    packed = pack_codes(weight)
    assert packed is not None
    padded = functional.pad(x.double(), (0, packed.num_groups * packed.group - x.shape[1]))
    blocks = padded.view(len(x), padded.shape[1] // packed.block, packed.block).abs()
    rounding = (blocks.amax(2, keepdim=True) / (2 * packed.limit)).expand_as(blocks).flatten(1)[:, : x.shape[1]]
    values = torch.from_numpy(weight.dequantize()).double()
    error = rounding @ values.abs().T + 3e-6 * x.double().abs() @ (values.abs() + shifts_of(weight)).T
    if weight.codebook is NF4:
        scales = torch.from_numpy(weight.scales).repeat_interleave(weight.group, 1).double()
        error += (x.abs() + rounding) @ scales.T / (2 * 8191)
    return error


@pytest.mark.parametrize(("out_features", "in_features", "group"), SHAPES)
@pytest.mark.parametrize("name", CODEBOOKS)
def test_equals_the_dequantized_product(name: str, out_features: int, in_features: int, group: int) -> None:
    weight = random_weight(*CODEBOOKS[name], out_features, in_features, group)
    bias = torch.randn(out_features)
    product, dequantized = multiply(weight, bias), torch.from_numpy(weight.dequantize()).double()
    for num_rows in (0, 1, MAX_ROWS, MAX_ROWS + 1, 70):
        x = torch.randn(num_rows, in_features)
        y = product(x)
        assert y.dtype == torch.float32
        expected = x.double() @ dequantized.T + bias
        assert ((y - expected).abs() <= largest_error(weight, x) + 3e-6 * bias.abs()).all()


@pytest.mark.parametrize("name", CODEBOOKS)
def test_sums_of_the_largest_integers_do_not_overflow(name: str) -> None:
    codebook, shift = CODEBOOKS[name]
    weight = random_weight(codebook, shift, 32, 256, 128)
    extreme = int(np.abs(codebook).argmax())
    codes = np.full_like(weight.codes, extreme if codebook.size == 256 else 17 * extreme)
    zeros = None if weight.zeros is None else np.full_like(weight.zeros, 0)
    weight = replace(weight, codes=codes, zeros=zeros)
    x = torch.ones(2, 256)
    x[1] = -1e30
    expected = x.double() @ torch.from_numpy(weight.dequantize()).double().T
    torch.testing.assert_close(multiply(weight)(x).double(), expected, rtol=1e-5, atol=0)


@pytest.mark.parametrize("out_features", [40, 2048], ids=["serial", "parallel"])
@pytest.mark.parametrize("name", ["int8", "uint4-zeros", "uint4-halves", "nf4"])
def test_row_is_bitwise_independent_of_its_neighbours(name: str, out_features: int) -> None:
    product = multiply(random_weight(*CODEBOOKS[name], out_features, 256, 64), torch.randn(out_features))
    x = torch.randn(2 * MAX_ROWS + 3, 256)
    y = product(x)
    for begin in range(len(x)):
        for end in {begin + 1, min(len(x), begin + MAX_ROWS), len(x)}:
            assert torch.equal(product(x[begin:end]), y[begin:end])


@pytest.mark.parametrize("x_bits", [16, pytest.param(8, marks=needs_bytes)])
@pytest.mark.parametrize(("in_features", "group"), [(1152, 1152), (1152, 384), (640, 64), (592, 16)])
@pytest.mark.parametrize("name", PLAIN_CODEBOOKS)
def test_unpacking_once_for_many_rows_keeps_all_bits(name: str, in_features: int, group: int, x_bits: int) -> None:
    """A panel is unpacked in parts, which begin and end inside a group, or cover several groups."""
    weight = random_weight(*CODEBOOKS[name], 70, in_features, group)
    product = make_quantized_linear(weight, torch.randn(70), x_bits)
    assert product is not None
    for num_rows in range(UNPACK_ROWS + 1, UNPACK_ROWS + 8):
        x = torch.randn(num_rows, in_features)
        assert torch.equal(product(x), torch.cat([product(rows) for rows in x.split(MAX_ROWS)]))


@pytest.mark.parametrize(("out_features", "in_features", "group"), SHAPES)
@pytest.mark.parametrize("name", BYTE_CODEBOOKS)
def test_activations_of_8_bits_are_exact_integers(name: str, out_features: int, in_features: int, group: int) -> None:
    weight = random_weight(*CODEBOOKS[name], out_features, in_features, group)
    bias = torch.randn(out_features)
    product, packed = make_quantized_linear(weight, bias, x_bits=8), pack_codes(weight)
    assert product is not None
    assert packed is not None
    dequantized = torch.from_numpy(weight.dequantize()).double()
    for num_rows in (0, 1, MAX_ROWS, MAX_ROWS + 1, ROWS_WITHOUT_TILES[8] + 1):
        x = torch.randn(num_rows, in_features)
        expected = multiply_codes(round_to_bytes(x, packed.block), weight, bias)
        magnitude = x.double().abs() @ (dequantized.abs() + shifts_of(weight)).T + bias.abs()
        assert ((product(x) - expected).abs() <= 6e-6 * magnitude).all()


@pytest.mark.parametrize("name", BYTE_CODEBOOKS)
def test_activations_of_8_bits_keep_rows_apart(name: str) -> None:
    product = make_quantized_linear(random_weight(*CODEBOOKS[name], 70, 256, 64), None, x_bits=8)
    assert product is not None
    x = torch.randn(2 * MAX_ROWS + 3, 256)
    x[1] = -1e30
    x[2] = 0
    x[4, 7], x[6, 201], x[8, 3] = torch.nan, torch.inf, -torch.inf
    y = product(x)
    for row in range(len(x)):
        assert torch.equal(product(x[row : row + 1])[0].view(torch.int32), y[row].view(torch.int32))
    assert y[[4, 6, 8]].isnan().all()
    assert not y[2].any()


def test_codes_of_more_than_8_bits_need_activations_of_16() -> None:
    weight, x = random_weight(NF4, None, 64, 384, 64), torch.randn(9, 384)
    product = make_quantized_linear(weight, None, x_bits=8)
    assert product is not None
    assert product.x_bits == 16
    assert torch.equal(product(x), multiply(weight)(x))


def test_a_cpu_without_vnni_rounds_activations_of_int8_weights_to_16_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quantized_linear, "HAS_VNNI", False)
    weight, x = random_weight(INT8, None, 70, 128, 32), torch.randn(9, 128)
    product = make_quantized_linear(weight, None, x_bits=8)
    assert product is not None
    assert product.x_bits == 16
    assert torch.equal(product(x), multiply(weight)(x))


def test_non_finite_values_stay_in_their_row() -> None:
    product = multiply(random_weight(INT8, None, 64, 256, 128))
    x = torch.randn(9, 256)
    expected = product(x)
    x[4, 7], x[6, 201], x[8, 3] = torch.nan, torch.inf, -torch.inf
    y = product(x)
    assert y[[4, 6, 8]].isnan().all()
    others = [0, 1, 2, 3, 5, 7]
    assert torch.equal(y[others], expected[others])


def test_tiny_and_huge_inputs() -> None:
    """Each block has its own factor, so a huge block does not hide the others."""
    weight = random_weight(INT8, None, 32, 384, 128)
    dequantized = torch.from_numpy(weight.dequantize()).double()
    x = torch.randn(4, 384)
    x[0] = 0
    x[1, :128] *= 1e-20
    x[1, 128:] = 0
    x[2, :128] = 0
    x[2, 128:] *= 1e30
    x[3] = 1e-38
    y, expected = multiply(weight)(x), x.double() @ dequantized.T
    assert not y[0].any()
    torch.testing.assert_close(y[1:3].double(), expected[1:3], rtol=1e-3, atol=0)
    assert y[3].abs().max() < 1e-30


def test_rows_of_a_wider_buffer() -> None:
    weight = random_weight(INT4, None, 64, 128, 32)
    x = torch.randn(5, 300)
    assert torch.equal(multiply(weight)(x[:, 3:131]), multiply(weight)(x[:, 3:131].contiguous()))


@pytest.mark.parametrize("name", CODEBOOKS)
def test_only_one_copy_of_the_weight_is_kept(name: str) -> None:
    weight = random_weight(*CODEBOOKS[name], 256, 512, 128)
    packed, groups = pack_codes(weight), groups_of(weight)
    assert packed is not None
    assert groups is not None
    assert packed.panels.nbytes == weight.codes.nbytes + groups.nbytes
    assert not np.shares_memory(packed.panels, weight.codes)


@pytest.mark.parametrize(("shift", "bits_per_weight"), [("halves", 5), ("minima", 6), (None, 5), ("zeros", 6)])
def test_scales_and_minima_take_16_bits_where_those_are_exact(shift: Shift | None, bits_per_weight: float) -> None:
    weight = random_weight(UINT4, shift, 64, 256, 32)
    packed = pack_codes(weight)
    assert packed is not None
    assert 8 * packed.panels.nbytes == bits_per_weight * 64 * 256
    halves = pack_codes(replace(weight, scales=weight.scales.astype(np.float16).astype(np.float32)))
    assert halves is not None
    assert halves.scale_bytes == 2
    assert 8 * halves.panels.nbytes == min(bits_per_weight, 5.5 if shift else 4.5) * 64 * 256


@pytest.mark.parametrize(("in_features", "padded", "block"), [(130, 192, 64), (576, 576, 64), (640, 640, 128)])
def test_a_single_group_is_padded_to_a_multiple_of_64(in_features: int, padded: int, block: int) -> None:
    packed = pack_codes(random_weight(INT8, None, 32, in_features, in_features))
    assert packed is not None
    assert (packed.num_groups, packed.group, packed.block) == (1, padded, block)


@pytest.mark.parametrize(("codebook", "group"), [(FP8, 128), (INT4, 24)], ids=["fp8", "odd-group"])
def test_other_weights_have_no_linear(codebook: np.ndarray, group: int) -> None:
    assert make_quantized_linear(random_weight(codebook, None, 64, 384, group), None) is None


@pytest.mark.parametrize(
    ("codebook", "zero"),
    [(UINT8, 16_000), (UINT4, -16_000), (UINT8, -32_768), (NF4, 3)],
    ids=["uint8", "uint4", "smallest", "nf4"],
)
def test_any_zero_point_is_exact(codebook: np.ndarray, zero: int) -> None:
    weight, x = random_weight(codebook, "zeros", 40, 256, 128), torch.randn(3, 256)
    assert weight.zeros is not None
    weight.zeros[3] = zero
    expected = x.double() @ torch.from_numpy(weight.dequantize()).double().T
    assert ((multiply(weight)(x) - expected).abs() <= largest_error(weight, x)).all()


@pytest.mark.parametrize("minima", [np.float32(1e-3), np.float32(1e30)], ids=["small", "huge"])
@pytest.mark.parametrize("codebook", [UINT8, UINT4], ids=["uint8", "uint4"])
@pytest.mark.parametrize("group", [16, 32])
def test_groups_of_equal_weights_are_the_minimum(codebook: np.ndarray, minima: np.float32, group: int) -> None:
    """A scale of 0, which GGUF files contain, leaves the minimum alone."""
    weight = random_weight(codebook, "minima", 40, 96, group)
    weight = replace(weight, scales=np.zeros_like(weight.scales), minima=np.full_like(weight.scales, minima))
    x = torch.randn(5, 96)
    expected = (x.double().sum(1, keepdim=True) * float(minima)).expand(5, 40)
    assert ((multiply(weight)(x) - expected).abs() <= largest_error(weight, x)).all()


def test_other_cpus_have_no_linear(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = random_weight(INT8, None, 70, 128, 32)
    assert isinstance(make_quantized_linear(weight, None), QuantizedLinear)
    monkeypatch.setattr(quantized_linear, "IS_SUPPORTED", False)
    assert make_quantized_linear(weight, None) is None


CPUS = [name for name in INSTRUCTION_SETS if runs_here(name)]
"""The CPUs that this CPU can imitate."""

PRINT_DIGEST = """
from tests.kernels.cpu.linear.test_quantized_linear import digest_of_products
print(digest_of_products())
"""


def digest_of_products(*bits: int, names: Sequence[str] = tuple(CODEBOOKS)) -> str:
    """Digest of products with 16-bit activations, or with activations of each number of bits in `bits`."""
    hashed = hashlib.sha256()
    torch.manual_seed(0)
    for codebook, shift in map(CODEBOOKS.__getitem__, names):
        for shape in SHAPES:
            weight, bias = random_weight(codebook, shift, *shape), torch.randn(shape[0])
            products = [make_quantized_linear(weight, bias, x_bits) for x_bits in (bits or (16,))]
            for num_rows in (1, 3, 30):
                x = torch.randn(num_rows, shape[1])
                for product in filter(None, products):
                    hashed.update(product(x).contiguous().numpy().tobytes())
    return hashed.hexdigest()


def digests_on(names: Sequence[str], printing: str = PRINT_DIGEST) -> set[str]:
    """What a program prints on this CPU and on the named CPUs."""
    return {run_python("-c", printing, **environment) for environment in ({}, *map(imitate, names))}


@needs_vnni
@pytest.mark.campaign
def test_every_kind_of_vnni_computes_the_same_bits() -> None:
    with_vnni = [name for name in CPUS if byte_products(INSTRUCTION_SETS[name]) == "int8 and int4"]
    assert len(digests_on(with_vnni, PRINT_DIGEST.replace("()", "(16, 8)"))) == 1


@needs_bytes
@pytest.mark.campaign
def test_avx2_and_vnni_multiply_plain_codes_by_8_bits_with_the_same_bits() -> None:
    printing = PRINT_DIGEST.replace("()", f"(8, names={PLAIN_CODEBOOKS})")
    assert len(digests_on([name for name in CPUS if byte_products(INSTRUCTION_SETS[name])], printing)) == 1


@pytest.mark.campaign
def test_every_cpu_computes_the_same_bits() -> None:
    assert len(digests_on([name for name in CPUS if integer_products(INSTRUCTION_SETS[name])])) == 1


EMULATION = ("-m", "tests.kernels.cpu.emulated_tiles")
needs_avx512 = pytest.mark.skipif(WIDTH != 16, reason="this CPU has no AVX-512, which every CPU with AMX has")


@needs_avx512
@pytest.mark.campaign
def test_tiles_compute_the_same_bits(tmp_path: Path) -> None:
    assert run_python(*EMULATION, NUMBA_CACHE_DIR=str(tmp_path)) == "the products are the same with tiles\n"


@needs_avx512
@pytest.mark.campaign
def test_tiles_compile(tmp_path: Path) -> None:
    said = run_python(*EMULATION, "compile", **imitate("amx"), NUMBA_CACHE_DIR=str(tmp_path))
    assert said == "compiled with AMX\n"


@pytest.mark.parametrize(("x_bits", "faster"), [(16, ("int8", "int4")), pytest.param(8, ("int8",), marks=needs_vnni)])
def test_tiles_are_used_for_many_rows_where_they_are_faster(
    x_bits: int, faster: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    used: list[int] = []
    monkeypatch.setattr(quantized_linear, "has_integer_tiles", lambda: True)
    monkeypatch.setattr(quantized_linear, "multiply_code_tiles", lambda *arguments: used.append(arguments[3]))
    most = ROWS_WITHOUT_TILES[x_bits]
    for name in ("int8", "int4", "nf4"):
        linear = make_quantized_linear(random_weight(*CODEBOOKS[name], 32, 128, 64), None, x_bits)
        assert linear is not None
        used.clear()
        for num_rows in (most, most + 1):
            linear(torch.zeros(num_rows, 128))
        assert used == ([most + 1] if name in faster else [])
