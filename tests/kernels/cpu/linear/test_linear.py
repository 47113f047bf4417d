from __future__ import annotations

import weakref
from types import SimpleNamespace

import pytest
import torch
from torch.nn import functional

from loramux.kernels.cpu.instructions import amx, avx512_bf16
from loramux.kernels.cpu.instructions.amx import TILE, TILE_INPUTS, TILE_PERMISSION, AmxPanels, has_amx
from loramux.kernels.cpu.instructions.avx512_bf16 import MAX_ROWS, Avx512Bf16Panels
from loramux.kernels.cpu.instructions.compiled import cpu_features
from loramux.kernels.cpu.linear import linear as cpu_linear
from loramux.kernels.cpu.linear.linear import FloatPanels, OneDnnProduct, PackedLinear, product_of

needs_pairs = pytest.mark.skipif("avx512bf16" not in cpu_features(), reason="this CPU has no AVX512_BF16")
needs_tiles = pytest.mark.skipif(not has_amx(), reason="this CPU has no AMX")


@pytest.mark.parametrize("has_bias", [False, True], ids=["no-bias", "bias"])
@pytest.mark.parametrize(
    ("out_features", "in_features"),
    [(64, 64), (63, 100), (1, 1), (512, 512), (1000, 257)],
    ids=["small", "odd", "one", "blocks", "odd-blocks"],
)
def test_equals_linear(out_features: int, in_features: int, has_bias: bool) -> None:
    weight = torch.randn(out_features, in_features)
    bias = torch.randn(out_features) if has_bias else None
    linear = PackedLinear(weight, bias)
    for num_rows in (*range(14), 16, 100):
        x = torch.randn(num_rows, in_features)
        torch.testing.assert_close(linear(x), functional.linear(x, weight, bias), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "product", [pytest.param(Avx512Bf16Panels, marks=needs_pairs), pytest.param(AmxPanels, marks=needs_tiles)]
)
@pytest.mark.parametrize("has_bias", [False, True], ids=["no-bias", "bias"])
@pytest.mark.parametrize(
    ("out_features", "in_features"),
    [
        (64, 64),
        (63, 101),
        (1, 1),
        (512, 512),
        (1000, avx512_bf16.BLOCK_INPUTS + 1),
        (96, 2 * avx512_bf16.BLOCK_INPUTS),
        # There are fewer panels than threads and, for many rows, two chunks of inputs.
        (32, 2048),
    ],
    ids=["small", "odd", "one", "large", "odd-blocks", "blocks", "deep"],
)
def test_bfloat16_products_equal_linear(
    out_features: int, in_features: int, has_bias: bool, product: type[Avx512Bf16Panels | AmxPanels]
) -> None:
    weight = torch.randn(out_features, in_features).bfloat16()
    bias = torch.randn(out_features).bfloat16() if has_bias else None
    multiply = product(weight, bias)
    for num_rows in (*range(2 * MAX_ROWS + 2), 31, 32, 33, 50, 64, 100, 300):
        x = torch.randn(num_rows, in_features)
        # Products of two bfloat16 numbers are exact in float32 and are summed in float32.
        expected = functional.linear(x.bfloat16().double(), weight.double(), bias if bias is None else bias.double())
        torch.testing.assert_close(multiply(x).double(), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("out_features", [40, 2048], ids=["serial", "parallel"])
@pytest.mark.parametrize(
    ("product", "dtype", "block_inputs"),
    [
        pytest.param(FloatPanels, torch.float32, cpu_linear.BLOCK_INPUTS, id="float32"),
        pytest.param(FloatPanels, torch.bfloat16, cpu_linear.BLOCK_INPUTS, id="bfloat16"),
        pytest.param(Avx512Bf16Panels, torch.bfloat16, avx512_bf16.BLOCK_INPUTS, id="pairs", marks=needs_pairs),
        pytest.param(AmxPanels, torch.bfloat16, amx.BLOCK_STEPS * TILE_INPUTS, id="tiles", marks=needs_tiles),
    ],
)
def test_row_is_bitwise_independent_of_its_neighbours(
    product: type[FloatPanels | Avx512Bf16Panels | AmxPanels], dtype: torch.dtype, block_inputs: int, out_features: int
) -> None:
    in_features = block_inputs + 50
    multiply = product(torch.randn(out_features, in_features).to(dtype), torch.randn(out_features))
    x = torch.randn(amx.MAX_ROWS + TILE + 3, in_features)
    y = multiply(x)
    for begin in range(len(x)):
        for end in {begin + 1, begin + 2, begin + MAX_ROWS, begin + TILE, begin + amx.MAX_ROWS, len(x)}:
            assert torch.equal(multiply(x[begin:end]), y[begin:end])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_non_finite_values_stay_in_their_row(dtype: torch.dtype) -> None:
    linear = PackedLinear(torch.randn(64, 48).to(dtype))
    x = torch.randn(9, 48)
    expected = linear(x)
    x[4, 7], x[6, 1] = torch.nan, torch.inf
    y = linear(x)
    assert not y[[4, 6]].isfinite().any()
    others = [0, 1, 2, 3, 5, 7, 8]
    assert torch.equal(y[others], expected[others])


@pytest.mark.parametrize("out_features", [96, 2048], ids=["small", "large"])
@pytest.mark.parametrize(
    "product",
    [
        FloatPanels,
        pytest.param(Avx512Bf16Panels, marks=needs_pairs),
        pytest.param(AmxPanels, marks=needs_tiles),
        pytest.param(
            OneDnnProduct,
            marks=pytest.mark.skipif(
                not torch.ops.mkldnn._is_mkldnn_bf16_supported(), reason="this CPU has no bfloat16 product"
            ),
        ),
    ],
)
def test_bfloat16_weight_accepts_and_returns_float32(
    product: type[FloatPanels | Avx512Bf16Panels | AmxPanels | OneDnnProduct], out_features: int
) -> None:
    weight, bias = torch.randn(out_features, 128).bfloat16(), torch.randn(out_features).bfloat16()
    x = torch.randn(7, 128)
    y = product(weight, bias)(x)
    assert y.dtype == torch.float32
    # CPUs that multiply bfloat16 directly round the input to bfloat16. oneDNN also rounds the output.
    torch.testing.assert_close(y, functional.linear(x, weight.float(), bias.float()), rtol=2e-2, atol=0.3)


@pytest.mark.parametrize(
    ("features", "machine", "has_onednn", "expected"),
    [
        ({"avx512f", "avx512bf16", "amx-bf16"}, "x86_64", True, AmxPanels),
        ({"avx512f", "avx512bf16"}, "x86_64", True, Avx512Bf16Panels),
        ({"avx512f"}, "x86_64", True, FloatPanels),
        ({"neon"}, "aarch64", True, OneDnnProduct),
        ({"neon"}, "aarch64", False, FloatPanels),
    ],
)
def test_fastest_bfloat16_product_is_chosen_for_each_cpu(
    features: set[str], machine: str, has_onednn: bool, expected: type, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu_linear, "cpu_features", lambda: features)
    monkeypatch.setattr(cpu_linear, "has_amx", lambda: "amx-bf16" in features)
    monkeypatch.setattr(cpu_linear.platform, "machine", lambda: machine)  # type: ignore[attr-defined]
    monkeypatch.setattr(cpu_linear.torch.backends.mkldnn, "is_available", lambda: has_onednn)  # type: ignore[attr-defined]
    monkeypatch.setattr(cpu_linear.torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: has_onednn)  # type: ignore[attr-defined]
    assert product_of(torch.bfloat16) is expected
    assert product_of(torch.float32) is FloatPanels


@needs_tiles
def test_many_rows_equal_single_rows_bitwise() -> None:
    """Use more rows than fit in the tiles, and more inputs than fit in the L2 cache."""
    x = torch.randn(300, 2048)
    multiply = AmxPanels(torch.randn(64, 2048).bfloat16(), torch.randn(64))
    assert torch.equal(multiply(x), torch.cat([multiply(row[None]) for row in x]))


@pytest.mark.parametrize(
    ("features", "system", "answer", "expected"),
    [
        ({"amx-bf16"}, "Linux", 0, True),
        ({"amx-bf16"}, "Linux", -1, False),
        ({"amx-bf16"}, "Darwin", 0, False),
        ({"avx512bf16"}, "Linux", 0, False),
    ],
    ids=["allowed", "refused", "not Linux", "no AMX"],
)
def test_amx_tiles_are_used_if_linux_allows_them(
    features: set[str], system: str, answer: int, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(amx, "cpu_features", lambda: features)
    monkeypatch.setattr(amx.platform, "system", lambda: system)  # type: ignore[attr-defined]
    asked: list[tuple[int, ...]] = []

    def syscall(*arguments: int) -> int:
        asked.append(arguments)
        return answer

    monkeypatch.setattr(amx.ctypes, "CDLL", lambda name: SimpleNamespace(syscall=syscall))  # type: ignore[attr-defined]
    assert has_amx.__wrapped__() is expected
    assert asked in ([], [TILE_PERMISSION])
    assert asked or not expected


@pytest.mark.parametrize("out_features", [64, 4096], ids=["small", "large"])
def test_rows_of_a_wider_buffer_equal_linear(out_features: int) -> None:
    weight, x = torch.randn(out_features, 48), torch.randn(5, 100)[:, 3:51]
    torch.testing.assert_close(PackedLinear(weight)(x), x @ weight.T, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("out_features", [64, 4096], ids=["small", "large"])
def test_original_weight_is_not_kept(out_features: int) -> None:
    weight = torch.randn(out_features, 64).bfloat16()
    original = weakref.ref(weight)
    linear = PackedLinear(weight)
    del weight
    assert original() is None
    assert (linear.out_features, linear.in_features) == (out_features, 64)
