"""An engine on a GPU says whether it rounds activations, and refuses to start if it cannot round them as configured."""

from __future__ import annotations

import json
import re
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from loramux.engine.execution.step_shape import step_shape
from loramux.engine.loop.assembly import _quantization
from loramux.engine.loop.config import EngineConfig
from loramux.engine.loop.loaded_base import LoadedBase, load_base
from loramux.engine.protocol.errors import ConfigNotUsable
from tests.engine.device.fake_gpu import LLAMA, CodedZeroWeights
from tests.engine.device.gpu_backend import gpu_backend, has_fp8_products
from tests.kernels.gpu.interpreted import DEVICE


def loaded(directory: Path, monkeypatch: pytest.MonkeyPatch, *, rounds_inputs: bool, activations: Any) -> LoadedBase:
    quantization = {"quant_method": "fp8", "activation_scheme": "dynamic"}
    (directory / "config.json").write_text(json.dumps({**LLAMA, "quantization_config": quantization}))
    config = EngineConfig(model_dir=str(directory), blob_url="", cache_dir="", device="cuda", activations=activations)
    return load_base(config, gpu_backend(monkeypatch, rounds_inputs), CodedZeroWeights())


def test_the_documented_sizes_are_those_of_the_first_steps_that_round_inputs() -> None:
    text = " ".join((Path(__file__).parents[3] / "docs" / "quantization.md").read_text().split())
    sizes = re.search(r"In steps with prompts of (\d+) or more tokens in all, and in decodes of (\d+) or more", text)
    assert sizes is not None
    num_tokens, num_decodes = map(int, sizes.groups())
    least = import_module("loramux.kernels.gpu.linear.coded_linear").MIN_DEQUANTIZED_ROWS
    for number, is_rounded in ((num_tokens - 1, False), (num_tokens, True)):
        assert (step_shape(number, 1, max_q=number, max_rank=0).num_tokens >= least) == is_rounded
    for number, is_rounded in ((num_decodes - 1, False), (num_decodes, True)):
        assert (step_shape(number, number, max_q=1, max_rank=0).num_tokens >= least) == is_rounded


@pytest.mark.skipif(not has_fp8_products(DEVICE), reason="torch multiplies FP8 on newer GPUs, and in newer versions")
@pytest.mark.parametrize("activations", [None, "fp8"])
def test_rounded_activations_are_part_of_the_format(
    activations: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = loaded(tmp_path, monkeypatch, rounds_inputs=True, activations=activations)
    assert _quantization(base) == "fp8, activations in fp8"


@pytest.mark.parametrize("activations", [None, "16bit"])
def test_activations_that_are_not_rounded_are_not_named(
    activations: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = loaded(tmp_path, monkeypatch, rounds_inputs=False, activations=activations)
    assert _quantization(base) == "fp8"


def test_a_gpu_that_cannot_round_any_inputs_refuses_the_setting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigNotUsable, match=r"this GPU cannot multiply any .* in fp8 .*: omit --activations"):
        loaded(tmp_path, monkeypatch, rounds_inputs=False, activations="fp8")
