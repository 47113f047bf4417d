from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save

from loramux.adapter_store.errors import AdapterRejected
from loramux.adapter_store.formats.packed.canonical import digest_of, write_canonical
from loramux.adapter_store.formats.packed.packing import pack
from loramux.adapter_store.validation.tensor_names import current_names
from loramux.adapter_store.validation.validation import validate_files
from tests.adapter_store.adapter_files import AdapterMaker
from tests.adapter_store.small_base import HIDDEN, OUTER_MODULES, VOCAB_SIZE, make_target

TARGET = make_target(outer_modules=OUTER_MODULES)
MODULES = ("model.embed_tokens", "lm_head", "self_attn.q_proj", "mlp.down_proj")
PREFIX = "base_model.model."
ONES = np.ones((VOCAB_SIZE, HIDDEN), np.float32)


def without_suffix(name: str) -> tuple[str, str]:
    return (name.removesuffix(".weight"), ".weight") if name.endswith(".weight") else (name, "")


def of_adapter(adapter: str) -> Callable[[str], str]:
    return lambda name: f"{without_suffix(name)[0]}.{adapter}{without_suffix(name)[1]}"


def deeper(name: str) -> str:
    return PREFIX + "model." + name.removeprefix(PREFIX)


SPELLINGS: dict[str, Callable[[str], str]] = {
    "without the prefix": lambda name: name.removeprefix(PREFIX),
    "with the adapter's name": of_adapter("default"),
    "with another adapter's name": of_adapter("my-adapter_2"),
    "of a wrapped base": deeper,
    "of a wrapped base, without the prefix": lambda name: deeper(name).removeprefix(PREFIX),
    "of a model that PEFT wrapped twice": lambda name: PREFIX + name,
    "of a parallel model": lambda name: "module." + name,
    "compiled as a whole": lambda name: "_orig_mod." + name,
    "compiled by layers": lambda name: name.replace("self_attn.", "_orig_mod.self_attn."),
    "sharded": lambda name: name.replace("self_attn.", "_fsdp_wrapped_module.self_attn."),
    "sharded and checkpointed": lambda name: name.replace(
        "layers.0.", "layers.0._fsdp_wrapped_module._checkpoint_wrapped_module."
    ),
    "of a multimodal base": lambda name: name.replace(".model.model.", ".model.model.language_model."),
    "of a base with a text model": lambda name: name.replace(".model.model.", ".model.model.text_model."),
    "of a multimodal base, before transformers 5": lambda name: name.replace(PREFIX, PREFIX + "language_model."),
    "of a multimodal base, without the prefix": lambda name: name.removeprefix(PREFIX).replace(
        "model.", "model.language_model.", 1
    ),
    "of a whole state": lambda name: "module._orig_mod." + of_adapter("default")(name),
}


@pytest.mark.parametrize("name", ["lora_magnitude", "lora_magnitude_vector.weight", "lora_magnitude_vector.default"])
def test_magnitudes_have_one_current_name(name: str) -> None:
    adapter, module = name.removeprefix("lora_magnitude_vector").strip("."), f"{PREFIX}model.layers.0.mlp.up_proj"
    a = f"{module}.lora_A.default.weight" if adapter == "default" else f"{module}.lora_A.weight"
    names = current_names([a, f"{module}.{name}"])
    assert names.originals[f"{module}.lora_magnitude_vector"] == f"{module}.{name}"
    assert not names.are_current


@pytest.mark.parametrize("part", ["embed_tokens.lora_embedding_A", "per_layer_model_projection.lora_A.weight"])
def test_modules_outside_the_decoder_layers_have_one_current_name(part: str) -> None:
    original = f"{PREFIX}model.language_model.{part}"
    assert current_names([original]).originals == {f"{PREFIX}model.{part}": original}


def digest(files: Any, path: Path, names: Callable[[str], str] = lambda name: name) -> str:
    tensors = save({names(name): tensor for name, tensor in files.tensors.items()})
    report = validate_files(files.config_bytes, tensors, TARGET)
    return write_canonical(tensors, report.scales, path, report.names)


@pytest.mark.parametrize("names", SPELLINGS.values(), ids=SPELLINGS)
def test_the_same_weights_have_the_same_digest(names: Callable[[str], str], tmp_path: Path) -> None:
    files = AdapterMaker(TARGET)(modules=MODULES)
    wanted = digest(files, tmp_path / "todays")
    assert digest(files, tmp_path / "older", names) == wanted == digest_of(tmp_path / "older")
    assert pack(tmp_path / "older", TARGET).digest == wanted
    tensors = save({names(name): tensor for name, tensor in files.tensors.items()})
    warnings = validate_files(files.config_bytes, tensors, TARGET).document()["warnings"]
    assert [warning["code"] for warning in warnings] == ["older_names"]


def test_names_from_a_headless_base_lack_the_model_prefix(tmp_path: Path) -> None:
    files = AdapterMaker(TARGET)(modules=("self_attn.q_proj", "model.embed_tokens"))
    wanted = digest(files, tmp_path / "todays")
    assert digest(files, tmp_path / "a", lambda name: name.replace(PREFIX + "model.", PREFIX)) == wanted
    assert digest(files, tmp_path / "b", lambda name: name.replace(PREFIX + "model.", "")) == wanted


def test_error_uses_the_name_from_the_file() -> None:
    files = AdapterMaker(TARGET)(modules=MODULES)
    tensors = {name.removeprefix(PREFIX): tensor for name, tensor in files.tensors.items()}
    own = "model.layers.0.mlp.down_proj.lora_A.weight"
    tensors[own] = tensors[own][:2]
    with pytest.raises(AdapterRejected) as refused:
        validate_files(files.config_bytes, save(tensors), TARGET)
    assert (refused.value.code, refused.value.param) == ("rank_mismatch", own)


def test_current_names_are_not_changed() -> None:
    files = AdapterMaker(TARGET)(modules=MODULES)
    names = current_names(files.tensors)
    assert names.are_current
    assert names.originals == {name: name for name in files.tensors}


def test_names_of_tinker_are_translated(tmp_path: Path) -> None:
    files = AdapterMaker(TARGET)(modules=(*(shape.name for shape in TARGET.modules), "lm_head"))
    wanted = digest(files, tmp_path / "todays")
    files.config["target_modules"] = "all-linear"
    assert digest(files, tmp_path / "tinker", lambda name: name.replace("lm_head", "model.unembed_tokens")) == wanted
    # PEFT does not load tensors of the head for this configuration.
    with pytest.raises(AdapterRejected) as refused:
        digest(files, tmp_path / "peft")
    assert refused.value.code == "unexpected_tensor"


@pytest.mark.parametrize(
    "second",
    [
        pytest.param("model.layers.1.self_attn.q_proj.lora_A.weight", id="one without the prefix"),
        pytest.param(PREFIX + "layers.1.self_attn.q_proj.lora_A.weight", id="one without the model"),
        pytest.param(PREFIX + "model.model.layers.1.self_attn.q_proj.lora_A.weight", id="one wrapped"),
        pytest.param(PREFIX + "model.layers.1.self_attn.q_proj.lora_A.default.weight", id="one of an adapter"),
        pytest.param(PREFIX * 2 + "model.layers.1.self_attn.q_proj.lora_A.weight", id="one wrapped twice"),
        pytest.param("module." + PREFIX + "model.layers.1.self_attn.q_proj.lora_A.weight", id="one parallel"),
        pytest.param(PREFIX + "model.language_model.layers.1.self_attn.q_proj.lora_A.weight", id="one in a text part"),
        pytest.param(PREFIX + "language_model.model.layers.1.self_attn.q_proj.lora_A.weight", id="one of a text part"),
        pytest.param(PREFIX + "model.text_model.layers.1.self_attn.q_proj.lora_A.weight", id="one in a text model"),
        pytest.param(PREFIX + "language_model.lm_head.lora_A.weight", id="a head of a text part"),
        pytest.param(PREFIX + "model.lm_head.lora_A.weight", id="a head of another depth"),
        pytest.param(PREFIX + "model._orig_mod.layers.0.self_attn.q_proj.lora_A.weight", id="the same compiled"),
    ],
)
def test_mixtures_and_collisions_are_refused(second: str) -> None:
    first = PREFIX + "model.layers.0.self_attn.q_proj.lora_A.weight"
    for names in ([first, second], [second, first]):
        with pytest.raises(AdapterRejected) as refused:
            current_names(names)
        assert refused.value.code == "ambiguous_names"
        assert refused.value.param in (first, second)


@pytest.mark.parametrize(
    "name",
    [
        PREFIX + "language_model.model.language_model.layers.0.self_attn.q_proj.lora_A.weight",
        PREFIX + "model.language_model.lm_head.lora_A.weight",
        PREFIX + "model.vision_tower.layers.0.self_attn.q_proj.lora_A.weight",
    ],
)
def test_names_of_other_parts_are_kept(name: str) -> None:
    assert current_names([name]).originals == {name: name}


def test_a_head_beside_text_layers_does_not_hide_a_mixture() -> None:
    names = ["lm_head.lora_A", "model.language_model.layers.0.mlp.up_proj.lora_A", "model.layers.1.mlp.up_proj.lora_A"]
    assert len(current_names([f"{PREFIX}{name}.weight" for name in names[:2]]).originals) == 2
    with pytest.raises(AdapterRejected, match="not all named in the same way"):
        current_names([f"{PREFIX}{name}.weight" for name in names])


def test_two_adapters_in_one_file_are_refused() -> None:
    names = [f"{PREFIX}model.layers.0.mlp.up_proj.lora_A.{adapter}.weight" for adapter in ("policy", "reference")]
    with pytest.raises(AdapterRejected, match="not all named in the same way"):
        current_names(names)


MULTIMODAL: dict[str, Callable[[str], str]] = {
    "transformers 5": lambda name: name.replace("model.", "model.language_model.", 1),
    "before": lambda name: "language_model." + name,
    "a part of a name": lambda name: name.replace("model.", "language_model.", 1),
}


@pytest.mark.parametrize("of_module", MULTIMODAL.values(), ids=MULTIMODAL)
def test_a_configuration_may_name_modules_of_a_multimodal_base(of_module: Callable[[str], str], tmp_path: Path) -> None:
    q_proj, down_proj = "model.layers.0.self_attn.q_proj", "model.layers.1.mlp.down_proj"
    named: dict[str, Any] = {
        "target_modules": [q_proj, down_proj],
        "rank_pattern": {down_proj: 2},
        "alpha_pattern": {q_proj: 3},
        "exclude_modules": ["model.layers.1.self_attn.q_proj"],
    }
    digests = []
    for rename in (lambda name: name, of_module):
        files = AdapterMaker(TARGET)(modules=("self_attn.q_proj", "mlp.down_proj"))
        tensors = {name: files.tensors[name] for name in files.tensors if q_proj in name or down_proj in name}
        for name in [name for name in tensors if down_proj in name]:
            tensors[name] = tensors[name][:2] if "lora_A" in name else tensors[name][:, :2].copy()
        renamed = {
            key: {rename(name): one for name, one in value.items()}
            if isinstance(value, dict)
            else list(map(rename, value))
            for key, value in named.items()
        }
        files.config |= renamed
        files.tensors = tensors
        digests.append(digest(files, tmp_path / str(len(digests))))
    assert digests[0] == digests[1]


@pytest.mark.parametrize("spelling", ["of a multimodal base", "of a multimodal base, before transformers 5"])
def test_trained_weights_of_a_multimodal_base_are_found(spelling: str, tmp_path: Path) -> None:
    digests = []
    for rename in (lambda name: name, SPELLINGS[spelling]):
        files = AdapterMaker(TARGET)(modules=("self_attn.q_proj",))
        files.tensors[PREFIX + "model.embed_tokens.token_adapter.trainable_tokens_delta"] = ONES[:2]
        files.tensors[PREFIX + "lm_head.weight"] = ONES
        embedding, head = (rename(PREFIX + key).removeprefix(PREFIX) for key in ("model.embed_tokens", "lm_head"))
        files.config |= {"trainable_token_indices": {embedding: [3, 4]}, "modules_to_save": [head]}
        tensors = save({rename(name): tensor for name, tensor in files.tensors.items()})
        report = validate_files(files.config_bytes, tensors, TARGET)
        assert report.num_trained_rows == {"model.embed_tokens": 2, "lm_head": VOCAB_SIZE}
        path = tmp_path / str(len(digests))
        digests.append(write_canonical(tensors, report.scales, path, report.names, trained=report.trained))
    assert digests[0] == digests[1]
