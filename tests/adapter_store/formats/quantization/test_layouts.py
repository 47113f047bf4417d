"""Weights of every released layout equal an independent float copy."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from loramux.adapter_store.formats.files.mapped_tensors import map_directory
from loramux.adapter_store.formats.quantization.base_format import CodedTensor, find_coded, read_format
from loramux.adapter_store.formats.quantization.base_weights import BaseWeights
from loramux.adapter_store.formats.quantization.reordered import ReorderedWeight
from loramux.kernels.quantized import INT4, INT8, QuantizedWeight
from tests.quantized_layouts import FP8_CONFIG, LAYOUTS, NF4_CONFIG, Layout, bytes_of, fp8, mx_scales, nf4

MODULE = "model.layers.0.self_attn.q_proj"


def write(directory: Path, tensors: dict[str, torch.Tensor], config: object) -> None:
    save_file(tensors, directory / "model.safetensors")
    (directory / "config.json").write_text(json.dumps({"quantization_config": config}))


def coded(directory: Path, name: str = f"{MODULE}.weight") -> CodedTensor:
    return find_coded(read_format(directory), map_directory(directory)).coded[name]


def quantized(directory: Path, layout: Layout, shape: tuple[int, int]) -> torch.Tensor:
    """Write one quantised weight and an ordinary tensor, and return the float weight."""
    tensors, values = layout.quantize(torch.randn(shape, generator=torch.Generator().manual_seed(0)) / 8)
    others = {"lm_head.weight": torch.ones(8, 4), f"{MODULE}.bias": torch.arange(4.0)}
    write(directory, {MODULE + suffix: tensor for suffix, tensor in tensors.items()} | others, layout.config)
    return values


@pytest.mark.parametrize("name", LAYOUTS)
def test_dequantised_weights_equal_an_independent_copy(tmp_path: Path, name: str) -> None:
    layout = LAYOUTS[name]
    # 200 outputs are not a whole number of blocks of 128.
    values = quantized(tmp_path, layout, (200, 256))
    found = coded(tmp_path)
    assert found.shape == (200, 256)
    weight = found.read()
    assert isinstance(weight, ReorderedWeight if layout.is_reordered else QuantizedWeight)
    np.testing.assert_array_equal(weight.dequantize(), values.numpy())
    np.testing.assert_array_equal(weight.dequantize(3, 10), values[3:10].numpy())
    base = BaseWeights(tmp_path)
    np.testing.assert_array_equal(base.rows(MODULE, 7, 150), values[7:150].numpy())
    np.testing.assert_array_equal(base.rows("lm_head", 0, 8), np.ones((8, 4), np.float32))
    bias = base.bias(MODULE)
    assert bias is not None
    assert bias.tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("name", ["ct-w8a8", "ct-w8a16", "ct-w4a16", "gptq-sym", "gptq-int8", "bnb-int8"])
def test_symmetric_weights_have_no_zero_points(tmp_path: Path, name: str) -> None:
    quantized(tmp_path, LAYOUTS[name], (16, 64))
    weight = coded(tmp_path).read()
    assert isinstance(weight, QuantizedWeight)
    assert weight.zeros is None
    assert weight.codebook is (INT4 if weight.bits == 4 else INT8)


@pytest.mark.parametrize("nested", [False, True])
def test_rows_that_are_not_whole_nf4_blocks_get_smaller_groups(tmp_path: Path, nested: bool) -> None:
    values = quantized(tmp_path, Layout(nf4(nested), NF4_CONFIG), (64, 96))
    weight = coded(tmp_path).read()
    assert isinstance(weight, QuantizedWeight)
    assert weight.group == 32
    np.testing.assert_array_equal(weight.dequantize(), values.numpy())


def test_inputs_that_are_not_whole_fp8_blocks_get_smaller_groups(tmp_path: Path) -> None:
    config = {**FP8_CONFIG, "weight_block_size": [128, 128]}
    values = quantized(tmp_path, Layout(lambda w: fp8(w, ".weight_scale_inv", (128, 128)), config), (130, 192))
    weight = coded(tmp_path).read()
    assert isinstance(weight, QuantizedWeight)
    assert weight.group == 64
    np.testing.assert_array_equal(weight.dequantize(), values.numpy())


def test_experts_of_gpt_oss_are_stacked_and_transposed(tmp_path: Path) -> None:
    codes, exponents, values = mx_scales(torch.randn((3, 40, 64), generator=torch.Generator().manual_seed(0)))
    name = "model.layers.0.mlp.experts.gate_up_proj"
    blocks = bytes_of(codes).view(3, 40, 2, 16)
    write(tmp_path, {f"{name}_blocks": blocks, f"{name}_scales": exponents}, {"quant_method": "mxfp4"})
    found = coded(tmp_path, name)
    assert found.shape == (3, 64, 40)
    wanted = values.transpose(1, 2).numpy()
    np.testing.assert_array_equal(found.read().dequantize(), wanted)
    np.testing.assert_array_equal(found.read().dequantize(1, 2), wanted[1:2])
