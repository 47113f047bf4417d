"""Weights equal the results of the formats' own programs: bitsandbytes, compressed-tensors and transformers.

Tests import the first two themselves, because every process that collects tests would take seconds to import them.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers.integrations.finegrained_fp8 import _dequantize_fp8_weight
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from loramux.adapter_store.formats.quantization.parts import CodedWeight
from tests.adapter_store.formats.quantization.test_layouts import MODULE, coded, write
from tests.quantized_layouts import FP8_CONFIG, NF4_CONFIG, scheme

WEIGHT = torch.randn((96, 256), generator=torch.Generator().manual_seed(1)) / 8


def read(directory: Path, tensors: dict[str, torch.Tensor], config: object, prefix: str = f"{MODULE}.") -> CodedWeight:
    write(directory, {prefix + name: tensor.contiguous() for name, tensor in tensors.items()}, config)
    return coded(directory).read()


@pytest.fixture(scope="module")
def bnb() -> Iterator[Any]:
    """bitsandbytes, which `tests/conftest.py` hides from peft."""
    with pytest.MonkeyPatch.context() as patch:
        if "bitsandbytes" in sys.modules:
            patch.delitem(sys.modules, "bitsandbytes")
        yield importlib.import_module("bitsandbytes.functional")


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("quant_type", ["nf4", "fp4"])
def test_bitsandbytes_four_bits(tmp_path: Path, bnb: Any, quant_type: str, nested: bool) -> None:
    packed, state = bnb.quantize_4bit(WEIGHT, quant_type=quant_type, compress_statistics=nested)
    tensors = {"weight": packed, **{f"weight.{name}": part for name, part in state.as_dict(packed=True).items()}}
    found = read(tmp_path, tensors, NF4_CONFIG).dequantize()
    np.testing.assert_allclose(found, bnb.dequantize_4bit(packed, state).numpy(), rtol=2e-7, atol=1e-7)


def test_bitsandbytes_int8(tmp_path: Path, bnb: Any) -> None:
    codes, largest, _ = bnb.int8_vectorwise_quant(WEIGHT.half())
    config = {"quant_method": "bitsandbytes", "load_in_8bit": True}
    found = read(tmp_path, {"weight": codes, "SCB": largest}, config).dequantize()
    np.testing.assert_allclose(found, bnb.int8_vectorwise_dequant(codes, largest).numpy(), rtol=1e-6)


FLOAT16 = {"actorder": None, "observer": "minmax"}
SCHEMES: dict[str, dict[str, Any]] = {
    "int-quantized": scheme(8, "int", "channel"),
    "float-quantized": scheme(8, "float", "channel"),
    "pack-quantized": scheme(4, "int", "group", group_size=64),
    "pack-quantized-asymmetric": scheme(4, "int", "group", group_size=32, symmetric=False),
    "pack-quantized-8": scheme(8, "int", "channel"),
    "pack-quantized-8-asymmetric": scheme(8, "int", "group", group_size=128, symmetric=False),
}


@pytest.mark.parametrize("name", SCHEMES)
def test_compressed_tensors(tmp_path: Path, name: str) -> None:
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
    from compressed_tensors.quantization.utils import calculate_qparams

    arguments = QuantizationArgs(**SCHEMES[name]["config_groups"]["group_0"]["weights"])
    plan = QuantizationScheme(targets=["Linear"], weights=arguments)
    grouped = WEIGHT.view(96, -1, arguments.group_size or 256)
    scale, zero = calculate_qparams(grouped.amin(2), grouped.amax(2), arguments)
    compressor = BaseCompressor.get_value_from_registry("-".join(name.split("-")[:2]))
    state = {"weight": WEIGHT, "weight_scale": scale, "weight_zero_point": zero}
    tensors = compressor.compress(state, plan)
    wanted = compressor.decompress(tensors, plan)["weight"]
    found = read(tmp_path, tensors, SCHEMES[name]).dequantize()
    np.testing.assert_allclose(found, wanted.numpy(), rtol=1e-6, atol=1e-7)


def test_fp8_blocks_of_transformers(tmp_path: Path) -> None:
    codes = WEIGHT.to(torch.float8_e4m3fn)
    scales = torch.rand((1, 2)) + 0.5
    config = {**FP8_CONFIG, "weight_block_size": [128, 128]}
    found = read(tmp_path, {"weight": codes, "weight_scale_inv": scales}, config).dequantize()
    wanted = _dequantize_fp8_weight(codes, scales, [128, 128], torch.float32)
    np.testing.assert_array_equal(found, wanted.numpy())


def test_mxfp4_of_transformers(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(2)
    blocks = torch.randint(0, 256, (2, 48, 3, 16), generator=generator, dtype=torch.uint8)
    scales = torch.randint(100, 130, (2, 48, 3), generator=generator, dtype=torch.uint8)
    name = "model.layers.0.mlp.experts.down_proj"
    write(tmp_path, {f"{name}_blocks": blocks, f"{name}_scales": scales}, {"quant_method": "mxfp4"})
    wanted = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
    np.testing.assert_array_equal(coded(tmp_path, name).read().dequantize(), wanted.numpy())
