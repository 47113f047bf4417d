"""Merged adapters equal the results of PEFT's `add_weighted_adapter`, and are valid uploads."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from peft.utils import merge_utils
from safetensors.numpy import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

from loramux.adapter_store.errors import MergeRefused
from loramux.adapter_store.formats.files.file_names import CONFIG_FILE, TENSORS_FILE
from loramux.adapter_store.formats.packed.pack_target import PackTarget
from loramux.adapter_store.merging.merge import MAX_ADAPTERS, merge_adapters
from loramux.adapter_store.merging.methods import MergeMethod, MergeSettings, SignRule, keep_largest, random_mask
from loramux.adapter_store.merging.plain_lora import PlainLora
from loramux.adapter_store.validation.validation import validate_files
from tests.adapter_store.linears import outer_linears
from tests.adapter_store.small_base import HIDDEN, VOCAB_SIZE, make_target

LLAMA: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": HIDDEN,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "plain": {"r": 4, "lora_alpha": 6, "target_modules": ["q_proj", "v_proj"]},
    "other": {"r": 4, "lora_alpha": 16, "target_modules": ["q_proj", "v_proj"]},
    "wider": {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj", "down_proj", "lm_head", "embed_tokens"]},
    "alphas": {
        "r": 4,
        "lora_alpha": 8,
        "target_modules": ["q_proj", "o_proj"],
        "alpha_pattern": {r".*layers\.1\..*(q_proj|k_proj)$": 3, "o_proj": 5},
        "velora_config": {"num_groups": 8},
    },
    "rslora": {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"], "use_rslora": True},
    "larger": {"r": 7, "lora_alpha": 8, "target_modules": ["v_proj", "up_proj"]},
    "ranks": {
        "r": 2,
        "lora_alpha": 8,
        "target_modules": ["v_proj", "up_proj"],
        "rank_pattern": {"layers.0.mlp.up_proj": 5},
    },
}


@pytest.fixture(scope="module")
def model() -> Any:
    """A randomly initialised model with every adapter in CONFIGS."""
    torch.manual_seed(0)
    base = LlamaForCausalLM(LlamaConfig(**LLAMA))
    peft: Any = None
    for name, settings in CONFIGS.items():
        config = LoraConfig(init_lora_weights=False, task_type="CAUSAL_LM", **settings)
        if peft is None:
            peft = get_peft_model(base, config, adapter_name=name)
        else:
            peft.add_adapter(name, config)
    with torch.no_grad():
        for name, parameter in peft.named_parameters():
            if "lora_" in name:
                parameter.normal_(0, 0.1)
    return peft


@pytest.fixture(scope="module")
def saved(model: PeftModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("adapters")
    model.save_pretrained(directory, save_embedding_layers=False)
    return directory


@pytest.fixture
def target() -> PackTarget:
    return replace(make_target(), outer_modules=outer_linears(VOCAB_SIZE, HIDDEN))


@pytest.fixture
def merged(saved: Path, tmp_path: Path) -> Callable[..., Path]:
    """A function that merges adapters of CONFIGS and returns the directory."""

    def merge(names: Sequence[str], weights: Sequence[float], settings: MergeSettings) -> Path:
        with ExitStack() as stack:
            adapters = [stack.enter_context(PlainLora(saved / name, name)) for name in names]
            merge_adapters(adapters, weights, settings, tmp_path)
        return tmp_path

    return merge


def peft_tensors(model: PeftModel, names: Sequence[str], weights: Sequence[float], **settings: Any) -> dict[str, Any]:
    """Return A and B of each module of PEFT's merged adapter, named as in a file."""
    model.add_weighted_adapter(list(names), list(weights), "merged", **settings)
    try:
        return {
            name.replace(".merged.", ".").removesuffix(".merged"): parameter.detach().numpy().copy()
            for name, parameter in model.named_parameters()
            if ".merged" in name
        }
    finally:
        model.delete_adapter("merged")


def assert_equal(ours: Path, theirs: dict[str, Any]) -> None:
    """Compare all tensors. Additional rows or columns of the PEFT tensors must be zero."""
    own = load_file(ours / TENSORS_FILE)
    assert own.keys() == theirs.keys()
    for name, matrix in own.items():
        rows, columns = matrix.shape
        np.testing.assert_allclose(matrix, theirs[name][:rows, :columns], rtol=2e-6, atol=1e-8, err_msg=name)
        assert not theirs[name][rows:].any()
        assert not theirs[name][:, columns:].any()


@pytest.mark.parametrize(
    ("names", "weights"),
    [
        (("plain", "other"), (0.7, 0.3)),
        (("plain", "other", "wider"), (1.0, -0.5, 2.0)),
        (("wider", "alphas"), (0.25, 0.75)),
        (("rslora", "plain"), (0.5, 1.5)),
        (("plain", "plain", "other", "wider", "alphas", "rslora"), (0.5, 0.1, 0.2, 0.3, -0.4, 0.5)),
    ],
    ids=lambda value: "+".join(map(str, value)),
)
@pytest.mark.parametrize(
    "settings",
    [
        MergeSettings(MergeMethod.LINEAR),
        MergeSettings(MergeMethod.CAT),
        MergeSettings(MergeMethod.TIES, 0.5),
        MergeSettings(MergeMethod.TIES, 0.3, SignRule.FREQUENCY),
        MergeSettings(MergeMethod.TIES, 0.001),
    ],
    ids=lambda settings: f"{settings.method}-{settings.density}-{settings.sign_rule}",
)
def test_merge_equals_peft(
    model: PeftModel, merged: Any, target: PackTarget, names: Sequence[str], weights: Sequence[float], settings: Any
) -> None:
    theirs = peft_tensors(
        model,
        names,
        weights,
        combination_type=settings.method.value,
        density=settings.density,
        majority_sign_method=settings.sign_rule.value,
    )
    ours = merged(names, weights, settings)
    assert_equal(ours, theirs)
    if settings.density > 0.01:
        report = validate_files((ours / CONFIG_FILE).read_bytes(), ours / TENSORS_FILE, target)
        assert set(report.scales.values()) == {1.0}
        assert len(report.scales) == len(theirs) // 2


@pytest.mark.parametrize("names", [("plain", "larger"), ("larger", "ranks"), ("ranks", "wider", "larger")])
def test_concatenation_takes_different_ranks(
    model: PeftModel, merged: Any, target: PackTarget, names: Sequence[str]
) -> None:
    weights = (0.5, -2.0, 3.0)[: len(names)]
    ours = merged(names, weights, MergeSettings(MergeMethod.CAT))
    assert_equal(ours, peft_tensors(model, names, weights, combination_type="cat"))
    report = validate_files((ours / CONFIG_FILE).read_bytes(), ours / TENSORS_FILE, target)
    assert set(report.scales.values()) == {1.0}
    reloaded = LoraConfig.from_pretrained(ours)
    assert reloaded.target_modules == set(report.scales)


def test_concatenation_is_the_exact_sum(model: PeftModel, merged: Any, saved: Path) -> None:
    names, weights = ("alphas", "rslora", "ranks"), (0.5, -1.0, 2.0)
    ours = load_file(merged(names, weights, MergeSettings(MergeMethod.CAT)) / TENSORS_FILE)
    for key, layer in model.named_modules():
        present = [name for name in names if name in getattr(layer, "lora_A", {})]
        if not present:
            continue
        wanted = sum(weights[names.index(name)] * layer.get_delta_weight(name) for name in present)
        product = ours[f"{key}.lora_B.weight"] @ ours[f"{key}.lora_A.weight"]
        np.testing.assert_allclose(product, wanted.detach().numpy(), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("method", [MergeMethod.DARE_LINEAR, MergeMethod.DARE_TIES])
def test_random_methods_equal_peft_with_the_same_masks(
    model: PeftModel, merged: Any, saved: Path, monkeypatch: pytest.MonkeyPatch, method: MergeMethod
) -> None:
    names, weights, settings = ("plain", "wider", "alphas"), (0.5, -1.0, 2.0), MergeSettings(method, 0.4, seed=7)
    masks: dict[bytes, Any] = {}
    for tensor in sorted({tensor for name in names for tensor in load_file(saved / name / TENSORS_FILE)}):
        found = [load_file(saved / name / TENSORS_FILE).get(tensor) for name in names]
        for index, matrix in enumerate(one for one in found if one is not None):
            masks[hashlib.sha256(matrix.tobytes()).digest()] = random_mask(settings, tensor, index, matrix.shape)

    def prune(tensor: torch.Tensor, density: float, rescale: bool) -> torch.Tensor:
        mask = masks[hashlib.sha256(tensor.numpy().tobytes()).digest()]
        return tensor * torch.from_numpy(mask) / density

    monkeypatch.setattr(merge_utils, "random_pruning", prune)
    theirs = peft_tensors(model, names, weights, combination_type=method.value, density=0.4)
    assert_equal(merged(names, weights, settings), theirs)


def test_random_methods_keep_the_density_and_follow_the_seed(merged: Any) -> None:
    def file(seed: int, density: float = 0.5) -> bytes:
        settings = MergeSettings(MergeMethod.DARE_LINEAR, density, seed=seed)
        directory: Path = merged(("plain", "other"), (1.0, 1.0), settings)
        return (directory / TENSORS_FILE).read_bytes()

    assert file(1) == file(1) != file(2)
    assert file(1, 1.0) == file(2, 1.0)
    mask = random_mask(MergeSettings(MergeMethod.DARE_TIES, 0.25), "a", 0, (100, 100))
    assert math.isclose(mask.mean(), 0.25, abs_tol=0.02)


def test_equal_values_are_pruned_in_order() -> None:
    kept = keep_largest(np.array([[1, -1, 1], [1, 2, 1]], np.float32), 0.5)
    assert kept.tolist() == [[1, -1, 0], [0, 2, 0]]
    assert not keep_largest(np.ones((2, 2), np.float32), 0.1).any()


def refused(call: Any) -> MergeRefused:
    with pytest.raises(MergeRefused) as error:
        call()
    return error.value


def test_linear_merge_needs_equal_ranks(merged: Any) -> None:
    for method in set(MergeMethod) - {MergeMethod.CAT}:
        error = refused(lambda method=method: merged(("plain", "larger"), (1, 1), MergeSettings(method)))
        assert (error.code, error.param) == ("rank_mismatch", "model.layers.0.self_attn.v_proj")
        assert "use cat" in error.message


@pytest.mark.parametrize("weight", [0.0, math.nan, math.inf, -math.inf, 1001.0])
def test_unusable_weight_is_refused(merged: Any, weight: float) -> None:
    error = refused(lambda: merged(("plain", "other"), (1.0, weight), MergeSettings(MergeMethod.CAT)))
    assert error.code == "invalid_weight"


@pytest.mark.parametrize("num", [0, 1, MAX_ADAPTERS + 1])
def test_number_of_adapters_is_bounded(merged: Any, num: int) -> None:
    error = refused(lambda: merged(("plain",) * num, (1.0,) * num, MergeSettings(MergeMethod.LINEAR)))
    assert error.code == "invalid_sources"


@pytest.mark.parametrize("density", [0.0, -0.1, 1.01, math.nan])
def test_unusable_density_is_refused(density: float) -> None:
    assert refused(lambda: MergeSettings(MergeMethod.TIES, density)).code == "invalid_density"
    assert refused(lambda: MergeSettings(MergeMethod.LINEAR, 0.5)).param == "density"


def test_merged_rank_is_bounded(tmp_path: Path) -> None:
    wide = write_adapter(tmp_path / "wide", {"q": (129, 32, 32)})
    error = refused(lambda: merge_directories(wide, wide, method=MergeMethod.CAT))
    assert (error.code, error.param) == ("rank_out_of_range", "model.layers.0.self_attn.q_proj")
    assert "258" in error.message


def test_adapters_of_different_bases_are_refused(tmp_path: Path) -> None:
    small, large = (write_adapter(tmp_path / str(size), {"q": (2, size, 32)}) for size in (32, 64))
    error = refused(lambda: merge_directories(small, large))
    assert (error.code, error.param) == ("shape_mismatch", "model.layers.0.self_attn.q_proj")


@pytest.mark.parametrize(
    "feature",
    [
        {"use_dora": True},
        {"lora_bias": True},
        {"bias": "all"},
        {"modules_to_save": ["lm_head"]},
        {"trainable_token_indices": [1, 2]},
        {"alora_invocation_tokens": [3]},
        {"target_parameters": ["a"]},
    ],
)
def test_adapter_that_is_more_than_products_is_refused(tmp_path: Path, feature: dict[str, Any]) -> None:
    other = write_adapter(tmp_path / "other", {"q": (2, 32, 32)}, **feature)
    error = refused(lambda: merge_directories(other, other))
    assert (error.code, error.param) == ("merge_unsupported", "other")
    assert next(iter(feature)) in error.message


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"base_model.model.model.layers.0.self_attn.q_proj.lora_magnitude_vector": (1, 32)}, "merge_unsupported"),
        ({"base_model.model.lm_head.weight": (4, 4)}, "merge_unsupported"),
        (
            {
                "base_model.model.lora_magnitude_vector.lora_A.weight": (4,),
                "base_model.model.lora_magnitude_vector.lora_B.weight": (4,),
            },
            "wrong_dimensions",
        ),
        ({"base_model.model.model.layers.0.self_attn.q_proj.lora_B.weight": None}, "missing_tensor"),
        ({"base_model.model.model.layers.0.self_attn.q_proj.lora_B.weight": (32, 3)}, "rank_mismatch"),
    ],
)
def test_tensors_that_are_no_pairs_are_refused(tmp_path: Path, change: dict[str, Any], code: str) -> None:
    directory = write_adapter(tmp_path / "odd", {"q": (2, 32, 32)})
    tensors = load_file(directory / TENSORS_FILE)
    for name, shape in change.items():
        if shape is None:
            del tensors[name]
        else:
            tensors[name] = np.ones(shape, np.float32)
    save_file(tensors, directory / TENSORS_FILE)
    assert refused(lambda: merge_directories(directory, directory)).code == code


def test_unreadable_files_are_refused(tmp_path: Path) -> None:
    directory = write_adapter(tmp_path / "odd", {"q": (2, 32, 32)})
    (directory / TENSORS_FILE).write_bytes(b"PK" + bytes(20))
    assert refused(lambda: merge_directories(directory, directory)).code == "archive_not_allowed"
    (directory / CONFIG_FILE).write_bytes(b"[" * 10_000)
    assert refused(lambda: merge_directories(directory, directory)).code == "invalid_json"


def test_layers_are_sorted_by_number(tmp_path: Path) -> None:
    directory = write_adapter(tmp_path / "deep", {f"{layer}": (1, 4, 4) for layer in range(12)})
    with PlainLora(directory, "deep") as adapter:
        assert [int(key.split(".")[2]) for key in adapter.modules] == list(range(12))


def write_adapter(directory: Path, shapes: dict[str, tuple[int, int, int]], **config: Any) -> Path:
    """Write an adapter of ones. `shapes` maps a layer, or `q` for layer 0, to the rank, inputs and outputs of its q
    projection.
    """
    directory.mkdir()
    tensors = {}
    for layer, (rank, in_features, out_features) in shapes.items():
        key = f"base_model.model.model.layers.{layer.replace('q', '0')}.self_attn.q_proj"
        tensors[f"{key}.lora_A.weight"] = np.ones((rank, in_features), np.float32)
        tensors[f"{key}.lora_B.weight"] = np.ones((out_features, rank), np.float32)
    save_file(tensors, directory / TENSORS_FILE)
    document = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["q_proj"], **config}
    (directory / CONFIG_FILE).write_text(json.dumps(document))
    return directory


def merge_directories(*directories: Path, method: MergeMethod = MergeMethod.LINEAR) -> None:
    with ExitStack() as stack:
        adapters = [stack.enter_context(PlainLora(directory, directory.name)) for directory in directories]
        merge_adapters(adapters, [1.0] * len(adapters), MergeSettings(method), directories[0])
