from __future__ import annotations

from typing import Any

import numpy as np

from tests.adapter_store.adapter_files import AdapterFiles, tensor_name
from tests.adapter_store.expert_base import expert_target, experts_named, stacked_files
from tests.adapter_store.small_base import HIDDEN
from tests.adapter_store.validation.hostile import MARK, Change, Hostile

TARGET = expert_target()
DOWN = experts_named("down_proj")
STACK = "base_model.model.model.layers.1.mlp.experts.{}lora_{}.weight"
INNER_A, OUTER_A = STACK.format("base_layer.", "A"), STACK.format("", "A")
TWICE = INNER_A.replace("base_layer", "gate_up_proj")
OUTER_B = STACK.format("", "B")
MAGNITUDE = "base_model.model.model.layers.1.mlp.experts.2.down_proj.lora_magnitude_vector"


def expert_tensor(expert: int, half: str = "A") -> str:
    return tensor_name(1, f"mlp.experts.{expert}.down_proj", half)


def _single(name: str, code: str, param: str | None, change: Change = lambda files: None, **adapter: Any) -> Hostile:
    adapter = {"modules": DOWN, **adapter}
    return Hostile(name=name, code=code, param=param, change=change, adapter=adapter, base=TARGET)


def _stacked(name: str, code: str, param: str | None, change: Change = lambda files: None, **config: Any) -> Hostile:
    def stack(files: AdapterFiles) -> None:
        made = stacked_files(**config)
        files.config, files.tensors = made.config, made.tensors
        change(files)

    return Hostile(name=name, code=code, param=param, change=stack, base=TARGET)


def _add(*experts: int) -> Change:
    def change(files: AdapterFiles) -> None:
        for expert in experts:
            files.tensors[expert_tensor(expert)] = np.ones((4, 24), np.float32)
            files.tensors[expert_tensor(expert, "B")] = np.ones((HIDDEN, 4), np.float32)

    return change


def _set(tensor: str, values: Any) -> Change:
    return lambda files: files.tensors.update({tensor: values})


def _drop(*tensors: str) -> Change:
    def change(files: AdapterFiles) -> None:
        for tensor in tensors:
            del files.tensors[tensor]

    return change


def _nan(tensor: str, row: int) -> Change:
    def change(files: AdapterFiles) -> None:
        files.tensors[tensor][row, 0] = np.nan

    return change


EXPERTS = [
    _single("an expert that the base lacks", "base_mismatch", expert_tensor(4), _add(4)),
    _single("an expert with a huge number", "base_mismatch", expert_tensor(10**8), _add(10**8)),
    _single("2,000 experts", "base_mismatch", expert_tensor(4), _add(*range(4, 2000))),
    _single("10,000 experts in a header", "header_too_large", "adapter_model.safetensors", _add(*range(10_000))),
    _single("an expert of a base without experts in the layer", "unexpected_tensor",
            tensor_name(0, "mlp.experts.1.down_proj", "A"),
            _set(tensor_name(0, "mlp.experts.1.down_proj", "A"), np.ones((4, 24), np.float32))),
    _single("one expert is missing", "missing_tensor", expert_tensor(2), _drop(expert_tensor(2))),
    _single("an expert that the configuration does not name", "unexpected_tensor", expert_tensor(1),
            target_modules=["experts.0.down_proj", "experts.2.down_proj", "experts.3.down_proj"]),
    _single("a named expert without tensors", "unknown_module", "target_modules[0]",
            target_modules=["experts.4.down_proj"]),
    _single("an expert with too high a rank", "rank_out_of_range", "r", rank=257),
    _single("an expert with another rank", "rank_mismatch", expert_tensor(3),
            _set(expert_tensor(3), np.ones((5, 24), np.float32))),
    _single("NaN in one expert", "not_finite", expert_tensor(3), _nan(expert_tensor(3), 1)),
    _single("DoRA without an expert's magnitude", "missing_tensor", MAGNITUDE, _drop(MAGNITUDE), use_dora=True),
    _single("stacked tensors without their parameter", "unexpected_tensor", OUTER_A,
            _set(OUTER_A, np.ones((16, 24), np.float32))),
    _stacked("experts in both forms", "ambiguous_names", "model.layers.1.mlp.experts.0.down_proj", _add(0, 1, 2, 3),
             target_modules=["down_proj"]),
    _stacked("a stacked expert beside its own tensors", "unexpected_tensor", expert_tensor(1), _add(1)),
    _stacked("a stack for another number of experts", "rank_mismatch", INNER_A, num_experts=5),
    _stacked("a stack with a broken rank", "rank_mismatch", OUTER_A, _set(OUTER_A, np.ones((11, 24), np.float32))),
    _stacked("a stack with too high a rank", "rank_out_of_range", "r", rank=257),
    _stacked("a stack for another width", "base_mismatch", OUTER_B, _set(OUTER_B, np.ones((40, 12), np.float32))),
    _stacked("a stack without its inner wrapper", "missing_tensor", None,
             _drop(INNER_A, INNER_A.replace("lora_A", "lora_B"))),
    _stacked("a stack with a wrapper too many", "unexpected_tensor",
             INNER_A.replace("base_layer.", "base_layer.base_layer."),
             _set(INNER_A.replace("base_layer.", "base_layer.base_layer."), np.ones((12, HIDDEN), np.float32))),
    _stacked("a stack named twice", "ambiguous_names", TWICE,
             _set(TWICE, np.ones((12, HIDDEN), np.float32))),
    _stacked("NaN in one expert of a stack", "not_finite", OUTER_A, _nan(OUTER_A, 7)),
    _stacked("DoRA of parameters", "unsupported_config", "use_dora", use_dora=True),
    _stacked("biases of parameters", "unsupported_config", "lora_bias", lora_bias=True),
    _stacked("activated parameters", "unsupported_config", "alora_invocation_tokens", alora_invocation_tokens=[3]),
    _stacked("unknown parameters", "unknown_module", "target_parameters[0]",
             target_parameters=[f"mlp.{MARK}", MARK]),
    _stacked("the parameter of one expert", "unknown_module", "target_parameters[0]",
             target_parameters=["mlp.experts.1.down_proj.weight"]),
    _stacked("parameters as a regular expression", "invalid_config", "target_parameters",
             target_parameters=[r".*\.down_proj"]),
    _stacked("parameters as text", "invalid_config", "target_parameters", target_parameters=MARK),
    _stacked("4,097 parameters", "invalid_config", "target_parameters", target_parameters=["down_proj"] * 4097),
]  # fmt: skip
