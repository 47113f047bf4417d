"""Pushes convert mlx-lm's adapters of experts and of a tied embedding for the base of the server."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from loramux.adapter_store.formats.packed.pack_target import PackTarget
from loramux.admin.client.push import PushRefused
from loramux.admin.client.weights_push import WeightsPush
from tests.adapter_store.expert_base import EXPERT_SIZE, HIDDEN, expert_target
from tests.adapter_store.formats.mlx.mlx_files import expert_tensors, random_pair, write_tensors
from tests.adapter_store.small_base import OUTER_MODULES, VOCAB_SIZE
from tests.admin.admin_side import ADMIN_KEY
from tests.admin.command_line import Run, printed_json

NUM_EXPERTS, RANK = 4, 3
SIZES = {"gate_proj": (HIDDEN, EXPERT_SIZE), "up_proj": (HIDDEN, EXPERT_SIZE), "down_proj": (EXPERT_SIZE, HIDDEN)}
PUSH = ("--tenant", "acme", "--name", "support", "--json")


@pytest.fixture
def admin_target() -> PackTarget:
    return replace(expert_target(NUM_EXPERTS), outer_modules=OUTER_MODULES, tied_embeddings=True)


def write_mlx(directory: Path, num_experts: int = NUM_EXPERTS) -> Path:
    tensors = expert_tensors("model.layers.1.mlp.switch_mlp", SIZES, num_experts, RANK)
    of_embedding = random_pair(np.random.default_rng(1), VOCAB_SIZE, HIDDEN, rank=RANK)
    tensors |= {f"model.embed_tokens.{leaf}": values for leaf, values in of_embedding.items()}
    return write_tensors(directory, tensors, rank=RANK, scale=2.0)


def test_a_push_converts_for_the_servers_base(loramux: Run, admin_url: str, tmp_path: Path) -> None:
    loramux("tenants", "create", "acme")
    directory = write_mlx(tmp_path / "mlx")
    pushed = printed_json(loramux("adapters", "push", directory, *PUSH))
    version = printed_json(loramux("adapters", "show", "acme/support@1", "--json"))
    modules = version["report"]["modules"]
    assert {name: found["ranks"] for name, found in modules.items()} == {
        "model.embed_tokens": [RANK],
        "lm_head": [RANK],
        "mlp.experts.gate_up_proj": [2 * RANK],
        "mlp.experts.down_proj": [RANK],
    }
    with WeightsPush(admin_url, ADMIN_KEY, "acme/program") as program:
        assert program.push(directory).version_digest == pushed["version_digest"]


def test_the_number_of_experts_is_that_of_the_servers_base(loramux: Run, admin_url: str, tmp_path: Path) -> None:
    loramux("tenants", "create", "acme")
    directory = write_mlx(tmp_path / "mlx", num_experts=5)
    says = "the adapter has LoRAs of 5 experts, but the base has 4 experts"
    refused = loramux("adapters", "push", directory, *PUSH)
    error = json.loads(refused.stdout)["error"]
    assert (refused.exit_code, error["code"], error["message"]) == (1, "base_mismatch", says)
    with WeightsPush(admin_url, ADMIN_KEY, "acme/program") as program, pytest.raises(PushRefused, match=says):
        program.push(directory)
