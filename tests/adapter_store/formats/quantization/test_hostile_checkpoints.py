"""If a checkpoint's tensors contradict its configuration, it is refused with the tensor's name."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from loramux.adapter_store.errors import AdapterUnavailable, BaseNotSupported
from loramux.adapter_store.formats.quantization.base_weights import BaseWeights
from tests.adapter_store.formats.quantization.test_layouts import MODULE, coded, write
from tests.quantized_layouts import LAYOUTS

Tensors = dict[str, torch.Tensor]
Change = Callable[[Tensors], object]


def put(suffix: str, tensor: torch.Tensor) -> Change:
    return lambda tensors: tensors.update({suffix: tensor})


def fill(suffix: str, value: float) -> Change:
    return lambda tensors: tensors[suffix].view(-1)[3:4].fill_(value)


def cut(suffix: str, dim: int = 0) -> Change:
    return lambda tensors: tensors.update({suffix: tensors[suffix].narrow(dim, 0, tensors[suffix].shape[dim] - 1)})


def drop(suffix: str) -> Change:
    return lambda tensors: tensors.pop(suffix)


def state(**changes: Any) -> Change:
    suffix = ".weight.quant_state.bitsandbytes__nf4"

    def change(tensors: Tensors) -> None:
        fields = json.loads(bytes(tensors[suffix].tolist())) | changes
        tensors[suffix] = torch.tensor(list(json.dumps(fields).encode()), dtype=torch.uint8)

    return change


INF, NAN = float("inf"), float("nan")
CASES: list[tuple[str, Change, str]] = [
    ("fp8-blocks", put(".weight_scale_inv", torch.ones(2, 3)), "need [2, 2]"),
    ("fp8-blocks", fill(".weight_scale_inv", 0), "weight_scale_inv contains a scale of 0"),
    ("fp8-blocks", fill(".weight_scale_inv", INF), "weight_scale_inv contains a value that is not finite"),
    ("fp8-blocks", drop(".weight_scale_inv"), "no tensor model.layers.0.self_attn.q_proj.weight_scale_inv"),
    ("fp8-blocks", fill(".weight", NAN), "weight contains NaN"),
    ("fp8-blocks", put(".weight_scale", torch.ones(1)), "two scale tensors"),
    ("fbgemm-fp8", put(".weight_scale", torch.ones(200, 3)), "does not fit a weight"),
    ("ct-w8a8", fill(".weight_scale", NAN), "not finite"),
    ("ct-w8a8", put(".weight_scale", torch.ones(200, 2)), "has 2 groups"),
    (
        "ct-w8a8",
        put(".weight", torch.zeros(200, 256).to(torch.float8_e4m3fn)),
        "is fp8, but quantization_config says int8",
    ),
    ("ct-w4a16", put(".weight_scale", torch.ones(200, 5)), "does not fit a weight"),
    ("ct-w4a16", put(".weight_scale", torch.ones(200, 8)), "has 8 groups, but groups of 64 of 256 inputs"),
    ("ct-w4a16", put(".weight_shape", torch.tensor([200, 250])), "says [200, 250], but [200, 256] weights are packed"),
    ("ct-w4a16", drop(".weight_shape"), "no tensor"),
    ("ct-w4a16-asymmetric", drop(".weight_zero_point"), "no tensor model.layers.0.self_attn.q_proj.weight_zero_point"),
    ("ct-w4a16-asymmetric", cut(".weight_zero_point"), "weight_zero_point has shape [24, 8], not [25, 8]"),
    ("ct-mxfp4", fill(".weight_scale", 255), "not finite"),
    ("ct-mxfp4", cut(".weight_scale", 1), "groups have 32 inputs"),
    ("ct-nvfp4", fill(".weight_scale", 0), "scale of 0"),
    ("ct-nvfp4", drop(".weight_global_scale"), "no tensor"),
    ("awq", cut(".scales"), "has 7 groups, but groups of 32 of 256 inputs"),
    ("awq", drop(".qzeros"), "no tensor model.layers.0.self_attn.q_proj.qzeros"),
    ("awq", fill(".scales", 0), "scale of 0"),
    ("awq", put(".qweight", torch.zeros(256, 25)), "qweight has dtype F32, not I32"),
    ("gptq-sym", drop(".qzeros"), "no tensor model.layers.0.self_attn.q_proj.qzeros"),
    ("gptq-sym", cut(".qzeros", 1), "qzeros has shape"),
    ("gptq-sym", cut(".scales"), "has 7 groups"),
    ("gptq-sym", fill(".scales", INF), "not finite"),
    ("gptq-act-order", fill(".g_idx", 8), "names a group outside [0, 8)"),
    ("gptq-act-order", fill(".g_idx", -1), "names a group outside [0, 8)"),
    ("gptq-act-order", put(".g_idx", torch.zeros(256, dtype=torch.int32)), "groups of different sizes"),
    ("gptq-act-order", cut(".g_idx"), "g_idx has shape [255]"),
    ("nf4", cut(".weight"), "has 25599 bytes for [200, 256] weights"),
    ("nf4", cut(".weight.absmax"), "has 799 scales for 800 blocks of 64"),
    ("nf4", fill(".weight.absmax", INF), "not finite"),
    ("nf4", put(".weight.quant_map", torch.ones(15)), "has 15 values"),
    ("nf4", state(shape=[200, -256]), "describes a weight [200, -256]"),
    ("nf4", state(shape=[1 << 40, 256]), "describes a weight"),
    ("nf4", state(blocksize=0), "with blocks of 0"),
    ("nf4", state(shape=7), "does not describe a weight"),
    ("nf4", state(padding="x" * 5000), "more than 4096 bytes"),
    ("nf4-double", state(nested_offset=NAN), "offset that is not finite"),
    ("nf4-double", cut(".weight.nested_absmax"), "does not fit 800 scales"),
    ("bnb-int8", cut(".SCB"), "has shape [199] for 200 outputs"),
    ("bnb-int8", fill(".SCB", NAN), "not finite"),
    ("bnb-int8", put(".weight_format", torch.tensor(1, dtype=torch.uint8)), "other than row-major"),
]


@pytest.mark.parametrize(("name", "change", "said"), CASES, ids=[f"{name}: {said}" for name, _, said in CASES])
def test_contradictions_are_refused(tmp_path: Path, name: str, change: Change, said: str) -> None:
    layout = LAYOUTS[name]
    tensors, _ = layout.quantize(torch.randn((200, 256), generator=torch.Generator().manual_seed(0)))
    change(tensors)
    write(tmp_path, {MODULE + suffix: tensor.contiguous() for suffix, tensor in tensors.items()}, layout.config)
    with pytest.raises(BaseNotSupported) as refusal:
        coded(tmp_path).read()
    assert said in str(refusal.value)
    assert MODULE in str(refusal.value)
    with pytest.raises(AdapterUnavailable, match="the base's weights cannot be read"):
        BaseWeights(tmp_path).rows(MODULE, 0, 1)


@pytest.mark.parametrize("shape", [(200,), (200, 16, 16), (0, 256)])
def test_codes_that_are_no_matrix_are_refused(tmp_path: Path, shape: tuple[int, ...]) -> None:
    config = LAYOUTS["fbgemm-fp8"].config
    write(tmp_path, {f"{MODULE}.weight": torch.zeros(shape).to(torch.float8_e4m3fn)}, config)
    with pytest.raises(BaseNotSupported, match="must be a matrix"):
        coded(tmp_path)


def test_a_weight_that_is_stored_twice_is_refused(tmp_path: Path) -> None:
    layout = LAYOUTS["awq"]
    tensors, values = layout.quantize(torch.randn((32, 64)))
    stored = {MODULE + suffix: tensor for suffix, tensor in tensors.items()} | {f"{MODULE}.weight": values}
    write(tmp_path, stored, layout.config)
    with pytest.raises(BaseNotSupported, match="both quantised and unquantised"):
        coded(tmp_path)
