"""The adapters that ship for the real model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from typer.testing import CliRunner

from loramux.admin.cli import app
from loramux.admin.demo.real.grading import GRADES
from loramux.admin.demo.real.held_out import ADAPTERS
from loramux.admin.demo.real.run import TENANTS

SMOLLM2 = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "head_dim": 64,
    "hidden_act": "silu",
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 100000.0,
    "tie_word_embeddings": True,
    "vocab_size": 49152,
    "torch_dtype": "bfloat16",
}
MAX_BYTES = 5_000_000


@pytest.fixture
def base(tmp_path: Path) -> Path:
    """The configuration of SmolLM2-135M-Instruct. A check needs no weights."""
    (tmp_path / "config.json").write_text(json.dumps(SMOLLM2))
    return tmp_path


def test_every_adapter_has_a_tenant_and_a_rule() -> None:
    shipped = {path.name for path in ADAPTERS.iterdir() if path.is_dir()}
    assert shipped == set(TENANTS.values()) == set(GRADES)


def test_all_adapters_together_are_small() -> None:
    assert sum(path.stat().st_size for path in ADAPTERS.rglob("*") if path.is_file()) < MAX_BYTES


def test_licences_are_stated() -> None:
    text = (ADAPTERS / "LICENSE.md").read_text()
    for said in ("SmolLM2-135M-Instruct", "Apache-2.0", *GRADES):
        assert said in text


@pytest.mark.parametrize("name", GRADES)
def test_adapter_would_be_served(name: str, base: Path) -> None:
    result = CliRunner().invoke(app, ["check", str(ADAPTERS / name), "--model", str(base), "--json"])
    document = json.loads(result.stdout)
    assert (result.exit_code, document["problems"]) == (0, [])
    assert document["facts"]["dtypes"] == ["BF16"]


@pytest.mark.parametrize("name", GRADES)
def test_adapter_is_trained_and_finite(name: str) -> None:
    with safe_open(ADAPTERS / name / "adapter_model.safetensors", "pt") as file:
        tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
    assert all(tensor.isfinite().all() for tensor in tensors.values())
    # B starts at zero.
    assert all(tensor.count_nonzero() > 0 for key, tensor in tensors.items() if "lora_B" in key)
    assert {tensor.dtype for tensor in tensors.values()} == {torch.bfloat16}


@pytest.mark.parametrize("name", GRADES)
def test_configuration_names_no_path_of_a_machine(name: str) -> None:
    config = json.loads((ADAPTERS / name / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == "HuggingFaceTB/SmolLM2-135M-Instruct"
