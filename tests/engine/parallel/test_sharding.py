"""The shares of all workers together compute the same as the whole model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from loramux.engine.architectures.layer_modules import Group
from loramux.engine.architectures.model_config import ModelConfig
from loramux.engine.parallel.sharding import check_sharding, module_shards, vocabulary_share, worker_config
from loramux.engine.protocol.errors import ConfigNotUsable
from loramux.kernels.layout import LinearShape

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 104,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "vocab_size": 99,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-6,
    "dtype": "float32",
}
PHI3 = {"architectures": ["Phi3ForCausalLM"]}
QWEN3 = {"architectures": ["Qwen3ForCausalLM"], "head_dim": 16}
QWEN2_MOE = {
    "architectures": ["Qwen2MoeForCausalLM"],
    "num_experts": 3,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 40,
    "shared_expert_intermediate_size": 24,
    "mlp_only_layers": [0],
}
"""Layer 0 is dense. The others have experts with separate gate and up, and a shared expert."""

GPT_OSS = {
    "architectures": ["GptOssForCausalLM"],
    "head_dim": 16,
    "num_local_experts": 3,
    "num_experts_per_tok": 2,
    "sliding_window": 16,
}
"""Stacked experts with biases, and attention sinks."""

GRANITE_MOE = {
    "architectures": ["GraniteMoeSharedForCausalLM"],
    "num_local_experts": 3,
    "num_experts_per_tok": 2,
    "shared_intermediate_size": 24,
    "embedding_multiplier": 1.0,
    "attention_multiplier": 0.25,
    "residual_multiplier": 1.0,
    "logits_scaling": 1.0,
}
"""Stacked experts, and a shared expert whose gate and up are one linear layer."""

HYBRID = {
    "architectures": ["Qwen3_5ForCausalLM"],
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "full_attention_interval": 2,
}
"""Every other layer has a gated delta rule in place of attention."""

RANK, SCALE = 3, 0.7
SIZES = [pytest.param(2, id="two"), pytest.param(4, id="more than kv heads"), pytest.param(8, id="a head each")]


def load(tmp_path: Path, changes: dict[str, Any]) -> ModelConfig:
    (tmp_path / "config.json").write_text(json.dumps({**LLAMA, **changes}))
    return ModelConfig.load(tmp_path)


def linears_of(model: ModelConfig) -> tuple[LinearShape, ...]:
    return (*model.modules, *(() if model.experts is None else model.experts.modules))


def indices(ranges: tuple[range, ...]) -> list[int]:
    return [index for one in ranges for index in one]


@pytest.mark.parametrize(
    "family",
    [{}, PHI3, QWEN3, QWEN2_MOE, GPT_OSS, GRANITE_MOE],
    ids=["llama", "fused", "norms of heads", "experts", "stacked experts", "fused shared expert"],
)
@pytest.mark.parametrize("size", SIZES)
def test_products_of_all_workers_equal_the_whole_product(family: dict[str, Any], size: int, tmp_path: Path) -> None:
    model = load(tmp_path, family)
    own = linears_of(worker_config(model, size))
    dice = np.random.default_rng(5)
    for index, module in enumerate(linears_of(model)):
        x = dice.standard_normal(module.in_features)
        W = dice.standard_normal((module.out_features, module.in_features))
        A = dice.standard_normal((RANK, module.in_features))
        B = dice.standard_normal((module.out_features, RANK))
        whole = W @ x + SCALE * (B @ (A @ x))
        summed, seen = np.zeros(module.out_features), set()
        for worker in range(size):
            shard = module_shards(model, size, worker)[index]
            inputs, outputs = indices(shard.inputs), indices(shard.outputs)
            assert (len(inputs), len(outputs)) == (own[index].in_features, own[index].out_features)
            y = W[np.ix_(outputs, inputs)] @ x[inputs] + SCALE * (B[outputs] @ (A[:, inputs] @ x[inputs]))
            if shard.is_summed:
                summed += y
            else:
                np.testing.assert_allclose(y, whole[outputs], rtol=0, atol=1e-12)
                seen.update(outputs)
        if seen:
            assert seen == set(range(module.out_features))
        else:
            np.testing.assert_allclose(summed, whole, rtol=0, atol=1e-12)


@pytest.mark.parametrize("size", SIZES)
def test_a_worker_has_the_keys_of_its_queries(size: int, tmp_path: Path) -> None:
    model = load(tmp_path, {})
    own, head_dim = worker_config(model, size).attention, model.attention.head_dim
    group, own_group = (one.num_heads // one.num_kv_heads for one in (model.attention, own))
    for worker in range(size):
        q, k, v = (indices(shard.outputs)[::head_dim] for shard in module_shards(model, size, worker)[:3])
        assert k == v
        for place, first_feature in enumerate(q):
            assert first_feature // head_dim // group == k[place // own_group] // head_dim


def test_gate_and_up_of_an_expert_have_the_inner_features_of_its_down(tmp_path: Path) -> None:
    model = load(tmp_path, QWEN2_MOE)
    assert model.experts is not None
    for worker in range(4):
        experts = module_shards(model, 4, worker)[len(model.modules) :]
        for expert in range(3):
            both, gate, up, down = experts[4 * expert : 4 * expert + 4]
            inner = list(range(10 * worker, 10 * worker + 10))
            assert indices(down.inputs) == indices(gate.outputs) == indices(up.outputs) == inner
            assert indices(both.outputs) == [*inner, *(40 + one for one in inner)]


@pytest.mark.parametrize("family", [QWEN2_MOE, GPT_OSS, GRANITE_MOE], ids=["experts", "stacked", "fused"])
def test_all_workers_have_the_whole_router(family: dict[str, Any], tmp_path: Path) -> None:
    model = load(tmp_path, family)
    routers = model.module_groups[Group.ROUTER]
    assert routers
    for index in routers:
        module, shard = model.modules[index], module_shards(model, 2, 1)[index]
        assert (indices(shard.inputs), indices(shard.outputs)) == (
            list(range(module.in_features)),
            list(range(module.out_features)),
        )
        assert not shard.is_summed


def test_norms_of_heads_are_as_wide_as_the_heads_of_a_worker(tmp_path: Path) -> None:
    model = load(tmp_path, QWEN3)
    norms = worker_config(model, 4).norm_shapes
    shards = module_shards(model, 4, 3)[-len(norms) :]
    widths = {norm.name: len(indices(shard.outputs)) for norm, shard in zip(norms, shards, strict=True)}
    assert widths["self_attn.q_norm"] == 2 * 16
    assert widths["self_attn.k_norm"] == 16
    assert widths["model.norm"] == 64


def test_each_token_belongs_to_one_worker() -> None:
    for vocab_size, size in ((99, 2), (99, 4), (5, 4), (3, 8), (64, 8)):
        shares = [vocabulary_share(vocab_size, size, worker) for worker in range(size)]
        assert [token for share in shares for token in share] == list(range(vocab_size))
        assert max(map(len, shares)) == -(-vocab_size // size)


@pytest.mark.parametrize(
    ("changes", "size", "reason"),
    [
        ({}, 3, "tensor_parallel_size 3 does not divide the model's 8 attention heads"),
        ({"intermediate_size": 102}, 4, "does not divide the model's 102 features of mlp.down_proj"),
        (
            {"num_attention_heads": 12, "num_key_value_heads": 4, "hidden_size": 96, "intermediate_size": 96},
            6,
            "neither divides the model's 4 key/value heads nor is a multiple of them",
        ),
        (
            {"architectures": ["Olmo2ForCausalLM"]},
            2,
            "tensor parallelism does not support norms over all heads, which this model has",
        ),
        (HYBRID, 2, "^tensor parallelism does not support a gated delta rule, which this model has: omit"),
        ({**QWEN2_MOE, "moe_intermediate_size": 42}, 4, "does not divide the model's 42 features of an expert"),
        (
            {**QWEN2_MOE, "shared_expert_intermediate_size": 42},
            4,
            "does not divide the model's 42 features of the shared expert",
        ),
        ({**QWEN2_MOE, "intermediate_size": 102}, 4, "does not divide the model's 102 features of mlp.down_proj"),
    ],
)
def test_what_cannot_be_divided_is_refused(changes: dict[str, Any], size: int, reason: str, tmp_path: Path) -> None:
    model = load(tmp_path, changes)
    check_sharding(model, 1) if "architectures" not in changes else None
    with pytest.raises(ConfigNotUsable, match=reason):
        check_sharding(model, size)


def test_a_feed_forward_size_that_no_layer_has_need_not_be_divided(tmp_path: Path) -> None:
    check_sharding(load(tmp_path, {**QWEN2_MOE, "mlp_only_layers": [], "intermediate_size": 102}), 4)
