"""A LoRA of a tied embedding and head, as PEFT makes it with `ensure_weight_tying`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from loramux.adapter_store.errors import AdapterRejected
from loramux.adapter_store.validation.validation import validate_files
from tests.adapter_store.adapter_files import AdapterFiles, AdapterMaker
from tests.adapter_store.small_base import OUTER_MODULES, make_target

TARGET = replace(make_target(outer_modules=OUTER_MODULES), tied_embeddings=True)
EMBEDDING, HEAD = "base_model.model.model.embed_tokens.lora_embedding_{}", "base_model.model.lm_head.lora_{}.weight"
BOTH = {"model.embed_tokens", "lm_head"}


def tied(**config: Any) -> AdapterFiles:
    modules = ("self_attn.q_proj", "model.embed_tokens", "lm_head")
    layers = config.get("layers_to_transform")
    files = AdapterMaker(TARGET)(modules=modules, layers=layers and tuple(layers), ensure_weight_tying=True, **config)
    for of_embedding, of_head in ("AB", "BA"):
        files.tensors[HEAD.format(of_head)] = np.ascontiguousarray(files.tensors[EMBEDDING.format(of_embedding)].T)
    return files


@pytest.mark.parametrize(
    "config",
    [
        pytest.param({"target_modules": ["q_proj", "lm_head"]}, id="the head is named"),
        pytest.param({"target_modules": ["q_proj", "embed_tokens"]}, id="the embedding is named"),
        pytest.param({"target_modules": ["q_proj", "embed_tokens"], "layers_to_transform": [1]}, id="one layer"),
        pytest.param({"target_modules": r"(.*\.)?(q_proj|lm_head|embed_tokens)"}, id="expression"),
    ],
)
def test_either_name_stands_for_both(config: dict[str, Any]) -> None:
    files = tied(**config)
    report = validate_files(files.config_bytes, files.tensor_bytes, TARGET)
    assert report.scales.keys() >= BOTH
    assert report.scales["lm_head"] == report.scales["model.embed_tokens"]


def test_the_head_alone_is_named_for_a_base_without_ties() -> None:
    files = tied(target_modules=["q_proj", "lm_head"])
    for half in "AB":
        del files.tensors[EMBEDDING.format(half)]
    report = validate_files(files.config_bytes, files.tensor_bytes, replace(TARGET, tied_embeddings=False))
    assert BOTH & report.scales.keys() == {"lm_head"}


@pytest.mark.parametrize("half", "AB")
@pytest.mark.parametrize("targets", [["lm_head"], r"(.*\.)?(lm_head|embed_tokens)"], ids=["list", "expression"])
def test_a_different_value_is_refused(half: str, targets: Any) -> None:
    files = tied(target_modules=targets)
    files.tensors = {name: values for name, values in files.tensors.items() if "q_proj" not in name}
    files.tensors[HEAD.format(half)][1, 2] += 1e-3
    with pytest.raises(AdapterRejected, match="the transposed LoRA of the embedding") as refused:
        validate_files(files.config_bytes, files.tensor_bytes, TARGET)
    assert (refused.value.code, refused.value.param) == ("base_mismatch", HEAD.format(half))
