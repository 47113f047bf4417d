"""The supported quantisations are read, and others are refused with a reason."""

from __future__ import annotations

from typing import Any

import pytest

from loramux.adapter_store.errors import BaseNotSupported
from loramux.adapter_store.formats.quantization.base_format import parse_format
from tests.quantized_layouts import FP8_CONFIG, LAYOUTS, NF4_CONFIG, gptq_config, scheme


@pytest.mark.parametrize("config", [{}, {"quantization_config": None}, {"quantization_config": {}}])
def test_a_float_checkpoint_has_no_format(config: dict[str, Any]) -> None:
    assert parse_format(config) is None


@pytest.mark.parametrize(
    ("layout", "name"),
    [
        ("fp8-blocks", "fp8"),
        ("ct-w4a16", "compressed-tensors int4"),
        ("ct-w8a8", "compressed-tensors int8"),
        ("awq", "awq int4"),
        ("gptq-int8", "gptq int8"),
        ("nf4", "bitsandbytes 4-bit"),
        ("bnb-int8", "bitsandbytes int8"),
    ],
)
def test_names(layout: str, name: str) -> None:
    found = parse_format({"quantization_config": LAYOUTS[layout].config})
    assert found is not None
    assert found.name == name
    assert not hasattr(found, "__dict__"), "an inherited interface without slots adds one"


def test_fp8_is_read_under_both_names() -> None:
    for fmt in ("e4m3", "float8_e4m3fn"):
        assert parse_format({"quantization_config": {**FP8_CONFIG, "fmt": fmt}}) is not None


def test_older_names_of_fields_are_read() -> None:
    assert parse_format({"compression_config": LAYOUTS["ct-w4a16"].config}) is not None
    without_method = {name: value for name, value in LAYOUTS["ct-w8a8"].config.items() if name != "quant_method"}
    assert parse_format({"quantization_config": without_method}) is not None
    awq = {"quant_method": "awq", "w_bit": 4, "q_group_size": 64, "zero_point": True, "version": "GEMM"}
    assert parse_format({"quantization_config": awq}) is not None


TWO_SCHEMES = scheme(4, "int", "group", group_size=64)
TWO_SCHEMES["config_groups"] |= {"group_1": scheme(4, "int", "group", group_size=32)["config_groups"]["group_0"]}


@pytest.mark.parametrize(
    ("config", "said"),
    [
        *(({"quant_method": name}, f"'{name}'") for name in ("exl2", "hqq", "aqlm", "torchao", "modelopt", "gguf")),
        ({"quant_method": "hqq"}, "use the float weights with --quantization"),
        ({"bits": 4}, "None"),
        ([4], "not an object"),
        ({"quant_method": ["fp8"]}, "not supported"),
        ({**FP8_CONFIG, "weight_block_size": [128, 0]}, "weight_block_size is [128, 0]"),
        ({**FP8_CONFIG, "weight_block_size": 128}, "weight_block_size is 128"),
        ({**FP8_CONFIG, "fmt": "e5m2"}, "only e4m3"),
        (gptq_config(3), "bits is 3; 4 or 8"),
        (gptq_config(True), "bits is True"),
        (gptq_config(4, group_size=0), "group_size is 0"),
        (gptq_config(4, checkpoint_format="marlin"), "layout 'marlin'"),
        ({"quant_method": "awq", "bits": 8}, "bits is 8"),
        ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "layout 'gemv'"),
        ({**NF4_CONFIG, "load_in_8bit": True}, "exactly one of"),
        ({"quant_method": "bitsandbytes"}, "exactly one of"),
        (scheme(3, "int", "group"), "num_bits is 3"),
        (scheme(8, "complex", "channel"), "type 'complex' and 8 bits"),
        ({**scheme(8, "int", "channel"), "config_groups": {}}, "1 to 64 groups"),
        ({**scheme(8, "int", "channel"), "config_groups": {"group_0": {"weights": None}}}, "does not quantise weights"),
        ({**scheme(8, "int", "channel"), "sparsity_config": {"format": "sparse-24-bitmask"}}, "sparse weights"),
        ({**scheme(8, "int", "channel"), "transform_config": {"config_groups": {}}}, "transform_config"),
        (TWO_SCHEMES, "two schemes for int4"),
    ],
)
def test_other_quantisations_are_refused_by_name(config: Any, said: str) -> None:
    with pytest.raises(BaseNotSupported) as refusal:
        parse_format({"quantization_config": config})
    assert said in str(refusal.value)
