"""The shares of all workers together compute the same as the whole model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from loramux.engine.architectures.model_config import ModelConfig
from loramux.engine.parallel.sharding import check_sharding, module_shards, vocabulary_share, worker_config
from loramux.engine.protocol.errors import ConfigNotUsable

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
RANK, SCALE = 3, 0.7
SIZES = [pytest.param(2, id="two"), pytest.param(4, id="more than kv heads"), pytest.param(8, id="a head each")]


def load(tmp_path: Path, changes: dict[str, Any]) -> ModelConfig:
    (tmp_path / "config.json").write_text(json.dumps({**LLAMA, **changes}))
    return ModelConfig.load(tmp_path)


def indices(ranges: tuple[range, ...]) -> list[int]:
    return [index for one in ranges for index in one]


@pytest.mark.parametrize("family", [{}, PHI3, QWEN3], ids=["llama", "fused", "norms of heads"])
@pytest.mark.parametrize("size", SIZES)
def test_products_of_all_workers_equal_the_whole_product(family: dict[str, Any], size: int, tmp_path: Path) -> None:
    model = load(tmp_path, family)
    own = worker_config(model, size)
    dice = np.random.default_rng(5)
    for index, module in enumerate(model.modules):
        x = dice.standard_normal(module.in_features)
        W = dice.standard_normal((module.out_features, module.in_features))
        A = dice.standard_normal((RANK, module.in_features))
        B = dice.standard_normal((module.out_features, RANK))
        whole = W @ x + SCALE * (B @ (A @ x))
        summed, seen = np.zeros(module.out_features), set()
        for worker in range(size):
            shard = module_shards(model, size, worker)[index]
            inputs, outputs = indices(shard.inputs), indices(shard.outputs)
            assert (len(inputs), len(outputs)) == (own.modules[index].in_features, own.modules[index].out_features)
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
    ],
)
def test_what_cannot_be_divided_is_refused(changes: dict[str, Any], size: int, reason: str, tmp_path: Path) -> None:
    model = load(tmp_path, changes)
    check_sharding(model, 1, is_quantized=False) if "architectures" not in changes else None
    with pytest.raises(ConfigNotUsable, match=reason):
        check_sharding(model, size, is_quantized=False)


def test_quantised_weights_are_refused(tmp_path: Path) -> None:
    model = load(tmp_path, {})
    check_sharding(model, 2, is_quantized=False)
    with pytest.raises(ConfigNotUsable, match="does not support quantised weights"):
        check_sharding(model, 2, is_quantized=True)
