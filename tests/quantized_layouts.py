"""Quantised checkpoints in the layouts of other programs, with their float weights.

The quantisers and the packing here share no code with the product. Each layout converts a float weight to the tensors
of a module, by suffix, and to the float32 weight that they represent.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel

Quantized = tuple[dict[str, Tensor], Tensor]
Quantize = Callable[[Tensor], Quantized]

_NEGATIVE = (-1.0, -0.6961928, -0.5250731, -0.3949175, -0.2844414, -0.1847734, -0.09105)
_POSITIVE = (0.0795803, 0.1609302, 0.2461123, 0.3379152, 0.4407098, 0.562617, 0.7229568, 1.0)
NF4 = torch.tensor([*_NEGATIVE, 0.0, *_POSITIVE])
FP4 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


@dataclass(frozen=True, slots=True)
class Layout:
    """`config` is the `quantization_config`. `is_reordered` weights have groups of inputs that are not adjacent."""

    quantize: Quantize
    config: dict[str, Any]
    is_reordered: bool = field(default=False)


def spread(values: Tensor, group: int) -> Tensor:
    return values.repeat_interleave(group, dim=1)


def affine(weight: Tensor, bits: int, group: int, symmetric: bool, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Unsigned codes `[out, in]`, and scales in `dtype` and zero points `[out, groups]`."""
    grouped = weight.view(weight.shape[0], -1, group)
    top = 2**bits - 1
    if symmetric:
        scale = grouped.abs().amax(2) / (top // 2)
        zero = torch.full_like(scale, 2 ** (bits - 1))
    else:
        low, high = grouped.amin(2).clamp(max=0), grouped.amax(2).clamp(min=0)
        scale = (high - low) / top
        zero = (-low / scale).round().clamp(1, top)
    scale = scale.to(dtype)
    codes = (weight / spread(scale.float(), group) + spread(zero, group)).round().clamp(0, top)
    return codes.int(), scale, zero.int()


def meant(codes: Tensor, scale: Tensor, zero: Tensor, group: int) -> Tensor:
    return (codes - spread(zero, group)) * spread(scale.float(), group)


def words(values: Tensor, bits: int, order: tuple[int, ...] | None = None) -> Tensor:
    """Pack unsigned values along the last axis into int32: element `order[i]` of each word is shifted by `i * bits`."""
    per_word = 32 // bits
    split = values.long().view(*values.shape[:-1], -1, per_word)
    packed = torch.zeros(split.shape[:-1], dtype=torch.long)
    for place, index in enumerate(order or range(per_word)):
        packed |= split[..., index] << (bits * place)
    return torch.where(packed >= 2**31, packed - 2**32, packed).int()


def fp8(weight: Tensor, scale_name: str, block: tuple[int, int] | None, **extra: Tensor) -> Quantized:
    out, size = weight.shape
    rows, columns = block or (out, size)
    scale = torch.stack(
        [
            torch.stack([weight[r : r + rows, c : c + columns].abs().amax() / 448 for c in range(0, size, columns)])
            for r in range(0, out, rows)
        ]
    )
    wide = scale.repeat_interleave(rows, 0)[:out].repeat_interleave(columns, 1)[:, :size]
    codes = (weight / wide).to(torch.float8_e4m3fn)
    if block is None:
        scale = scale.reshape(())
    return {".weight": codes, scale_name: scale, **extra}, codes.float() * wide


def awq(weight: Tensor) -> Quantized:
    codes, scale, zero = affine(weight, 4, 32, False, torch.float16)
    tensors = {
        ".qweight": words(codes.T.contiguous(), 4, AWQ_ORDER),
        ".qzeros": words(zero.T.contiguous(), 4, AWQ_ORDER),
        ".scales": scale.T.contiguous(),
    }
    return tensors, meant(codes, scale, zero, 32)


def gptq(bits: int, symmetric: bool, act_order: bool = False, offset: int = 1, group: int = 32) -> Quantize:
    def quantize(weight: Tensor) -> Quantized:
        size = weight.shape[1]
        width = size if group == -1 else group
        order = torch.randperm(size, generator=torch.Generator().manual_seed(4)) if act_order else torch.arange(size)
        codes, scale, zero = affine(weight[:, order], bits, width, symmetric, torch.float16)
        groups, unordered, values = (
            torch.empty(size, dtype=torch.int32),
            torch.empty_like(codes),
            torch.empty(weight.shape),
        )
        groups[order] = (torch.arange(size) // width).int()
        unordered[:, order] = codes
        values[:, order] = meant(codes, scale, zero, width)
        tensors = {
            ".qweight": words(unordered.contiguous(), bits).T.contiguous(),
            ".qzeros": words((zero.T - offset).contiguous() & (2**bits - 1), bits),
            ".scales": scale.T.contiguous(),
            ".g_idx": groups,
        }
        return tensors, values

    return quantize


def packed(bits: int, group: int, symmetric: bool) -> Quantize:
    """compressed-tensors, `pack-quantized`."""

    def quantize(weight: Tensor) -> Quantized:
        out, size = weight.shape
        width = size if group == -1 else group
        codes, scale, zero = affine(weight, bits, width, symmetric, torch.bfloat16)
        tensors = {
            ".weight_packed": words(codes, bits),
            ".weight_scale": scale,
            ".weight_shape": torch.tensor([out, size]),
        }
        if not symmetric:
            tensors[".weight_zero_point"] = words(zero.T.contiguous(), bits).T.contiguous()
        return tensors, meant(codes, scale, zero, width)

    return quantize


def int8_channels(weight: Tensor) -> Quantized:
    codes, scale, zero = affine(weight, 8, weight.shape[1], True, torch.bfloat16)
    return {".weight": (codes - 128).to(torch.int8), ".weight_scale": scale}, meant(codes, scale, zero, weight.shape[1])


def fp8_channels(name: str) -> Quantize:
    def quantize(weight: Tensor) -> Quantized:
        scale = (weight.abs().amax(1, keepdim=True) / 448).bfloat16()
        codes = (weight / scale.float()).to(torch.float8_e4m3fn)
        return {".weight": codes, name: scale}, codes.float() * scale.float()

    return quantize


def nearest(values: Tensor, codebook: Tensor) -> Tensor:
    return (values[..., None] - codebook).abs().argmin(-1)


def bytes_of(codes: Tensor, low_first: bool = True) -> Tensor:
    first, second = codes[..., ::2], codes[..., 1::2]
    return (first | second << 4 if low_first else first << 4 | second).to(torch.uint8)


def mx_scales(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Codes, exponents and values of mxfp4 in groups of 32 along the last axis."""
    grouped = weight.reshape(*weight.shape[:-1], -1, 32)
    exponents = (grouped.abs().amax(-1).log2().floor() - 2).int()
    scale = 2.0 ** exponents[..., None]
    codes = nearest(grouped / scale, FP4)
    return codes.reshape(weight.shape), (exponents + 127).to(torch.uint8), (FP4[codes] * scale).reshape(weight.shape)


def mxfp4_packed(weight: Tensor) -> Quantized:
    codes, exponents, values = mx_scales(weight)
    return {".weight_packed": bytes_of(codes), ".weight_scale": exponents}, values


def nvfp4(weight: Tensor) -> Quantized:
    grouped = weight.view(weight.shape[0], -1, 16)
    overall = 448 * 6 / weight.abs().max()
    stored = (grouped.abs().amax(2) / 6 * overall).to(torch.float8_e4m3fn)
    scale = (stored.float() / overall)[..., None]
    codes = nearest(grouped / scale, FP4)
    tensors = {
        ".weight_packed": bytes_of(codes.view(weight.shape)),
        ".weight_scale": stored,
        ".weight_global_scale": overall.reshape(1),
    }
    return tensors, (FP4[codes] * scale).view(weight.shape)


def nf4(nested: bool, block: int = 64) -> Quantize:
    """bitsandbytes: blocks of consecutive weights, with scales that may be quantised, too."""

    def quantize(weight: Tensor) -> Quantized:
        blocks = weight.reshape(-1, block)
        absmax = blocks.abs().amax(1)
        state: dict[str, Any] = {
            "quant_type": "nf4",
            "blocksize": block,
            "dtype": "bfloat16",
            "shape": list(weight.shape),
        }
        tensors = {".weight.quant_map": NF4}
        if nested:
            offset = absmax.mean()
            levels = torch.linspace(-1, 1, 256)
            parts = [(absmax - offset)[i : i + 256] for i in range(0, absmax.numel(), 256)]
            largest = torch.stack([part.abs().max() for part in parts])
            coded = [nearest(part / most, levels) for part, most in zip(parts, largest, strict=True)]
            absmax = torch.cat([levels[c] * most for c, most in zip(coded, largest, strict=True)]) + offset
            tensors[".weight.absmax"] = torch.cat(coded).to(torch.uint8)
            tensors[".weight.nested_absmax"], tensors[".weight.nested_quant_map"] = largest, levels
            state |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": offset.item()}
        else:
            tensors[".weight.absmax"] = absmax
        codes = nearest(blocks / absmax[:, None], NF4)
        tensors[".weight"] = bytes_of(codes, low_first=False).reshape(-1, 1)
        text = json.dumps(state).encode()
        tensors[".weight.quant_state.bitsandbytes__nf4"] = torch.tensor(list(text), dtype=torch.uint8)
        return tensors, (NF4[codes] * absmax[:, None]).reshape(weight.shape)

    return quantize


def bnb_int8(weight: Tensor) -> Quantized:
    largest = weight.abs().amax(1)
    codes = (weight / largest[:, None] * 127).round().to(torch.int8)
    tensors = {".weight": codes, ".SCB": largest, ".weight_format": torch.tensor(0, dtype=torch.uint8)}
    return tensors, codes * (largest / 127)[:, None]


def scheme(bits: int, kind: str, strategy: str, **weights: Any) -> dict[str, Any]:
    symmetric = weights.pop("symmetric", True)
    arguments = {"num_bits": bits, "type": kind, "strategy": strategy, "symmetric": symmetric, **weights}
    groups = {"group_0": {"targets": ["Linear"], "weights": arguments, "input_activations": None}}
    return {"quant_method": "compressed-tensors", "config_groups": groups, "ignore": ["lm_head"]}


def gptq_config(bits: int, **changes: Any) -> dict[str, Any]:
    return {"quant_method": "gptq", "bits": bits, "group_size": 32, "sym": True, "desc_act": False, **changes}


FP8_CONFIG = {"quant_method": "fp8", "activation_scheme": "dynamic", "modules_to_not_convert": ["lm_head"]}
NF4_CONFIG = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
LAYOUTS: dict[str, Layout] = {
    "fp8-tensor-static": Layout(
        lambda weight: fp8(weight, ".weight_scale", None, **{".input_scale": torch.tensor(0.5)}),
        {**FP8_CONFIG, "activation_scheme": "static"},
    ),
    "fp8-blocks": Layout(
        lambda weight: fp8(weight, ".weight_scale_inv", (128, 128)), {**FP8_CONFIG, "weight_block_size": [128, 128]}
    ),
    "fbgemm-fp8": Layout(fp8_channels(".weight_scale"), {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0}),
    "ct-fp8-channel": Layout(fp8_channels(".weight_scale"), scheme(8, "float", "channel")),
    "ct-fp8-blocks": Layout(
        lambda weight: fp8(weight, ".weight_scale", (128, 128)),
        scheme(8, "float", "block", block_structure=[128, 128]),
    ),
    "ct-w8a8": Layout(int8_channels, scheme(8, "int", "channel")),
    "ct-w8a16": Layout(packed(8, -1, True), scheme(8, "int", "channel")),
    "ct-w8a16-asymmetric": Layout(packed(8, 64, False), scheme(8, "int", "group", group_size=64, symmetric=False)),
    "ct-w4a16": Layout(packed(4, 64, True), scheme(4, "int", "group", group_size=64)),
    "ct-w4a16-asymmetric": Layout(packed(4, 32, False), scheme(4, "int", "group", group_size=32, symmetric=False)),
    "ct-mxfp4": Layout(mxfp4_packed, scheme(4, "float", "group", group_size=32)),
    "ct-nvfp4": Layout(nvfp4, scheme(4, "float", "tensor_group", group_size=16)),
    "awq": Layout(awq, {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}),
    "gptq-sym": Layout(gptq(4, True), gptq_config(4)),
    "gptq-asymmetric": Layout(gptq(4, False), gptq_config(4, sym=False)),
    "gptq-act-order": Layout(gptq(4, False, act_order=True), gptq_config(4, desc_act=True, sym=False), True),
    "gptq-v2-channel": Layout(
        gptq(4, False, offset=0, group=-1), gptq_config(4, checkpoint_format="gptq_v2", group_size=-1)
    ),
    "gptq-int8": Layout(gptq(8, True), gptq_config(8)),
    "gptq-int8-act-order": Layout(gptq(8, True, act_order=True), gptq_config(8, desc_act=True), True),
    "nf4": Layout(nf4(False), NF4_CONFIG),
    "nf4-double": Layout(nf4(True), {**NF4_CONFIG, "bnb_4bit_use_double_quant": True}),
    "bnb-int8": Layout(bnb_int8, {"quant_method": "bitsandbytes", "load_in_8bit": True}),
}
"""Released layouts of linear layers, by name."""


def quantize_directory(model: PreTrainedModel, directory: Path, layout: Layout, keep: str = "lm_head") -> None:
    """Quantise the linear layers of a saved model in its directory, and give `model` the dequantised weights.

    Linears whose names contain `keep` stay as they are.
    """
    tensors = load_file(directory / "model.safetensors")
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) and keep not in name:
            stored, values = layout.quantize(tensors.pop(f"{name}.weight").float())
            tensors |= {name + suffix: tensor.clone() for suffix, tensor in stored.items()}
            module.weight.data = values
    save_file(tensors, directory / "model.safetensors")
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**config, "quantization_config": layout.config}))
