"""How the workers of a tensor-parallel engine divide a model, as in Megatron-LM (Shoeybi et al., 2019).

The projections that read the residual (q, k, v, gate, up) are divided by their outputs, and those that write it (o,
down) by their inputs. Each worker has its share of the heads and of the inner features, and the outputs of o and down
are added up over the workers. Each expert is divided like a dense block, and all workers have the whole router, so
they choose the same experts. All workers have the whole embedding. The head is divided by tokens.

An adapter adds `B (A x)`. In a layer that is divided by outputs, a worker has all of A and a share of B. In a layer
that is divided by inputs, it has a share of A and all of B. It then adds its part of `B (A x)` to its part of the
base's product, and the sum over the workers contains both. Adapters therefore need no communication of their own.

This module does not import torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from loramux.engine.architectures.family import PROJECTION_WIDE
from loramux.engine.architectures.layer_heads import LayerHeads
from loramux.engine.architectures.layer_modules import Group
from loramux.engine.architectures.mixture_config import MixtureConfig
from loramux.engine.architectures.model_config import ModelConfig
from loramux.engine.protocol.errors import ConfigNotUsable
from loramux.kernels.layout import LinearShape


@dataclass(frozen=True, slots=True)
class Shard:
    """A worker's inputs and outputs of one module, as half-open ranges of the whole module's indices.

    With `is_summed`, the outputs of all workers are added up.
    """

    inputs: tuple[range, ...]
    outputs: tuple[range, ...]
    is_summed: bool = False


def check_sharding(model: ModelConfig, size: int) -> None:
    """Raise ConfigNotUsable if `size` workers cannot divide the model. `check_groups` checks quantised weights."""
    attention, mixture = model.attention, model.mixture
    unsupported = {
        "norms between its experts and the shared block": mixture is not None
        and mixture.names.branch_norms is not None,
        "a gated delta rule": model.delta is not None,
        "parallel residuals": model.altup is not None,
        "an input embedding for each layer": model.layer_input_size > 0,
        "layers whose K and V differ in size": attention.has_uneven_cache,
        "norms over all heads": attention.qk_norm == PROJECTION_WIDE,
    }
    for feature, is_present in unsupported.items():
        if is_present:
            raise ConfigNotUsable(
                f"tensor parallelism does not support {feature}, which this model has: omit tensor_parallel_size"
            )
    heads, kv_heads = attention.num_heads, attention.num_kv_heads
    counts = [(heads, "attention heads")]
    for layer, inner_size in enumerate(model.layer_intermediate_sizes):
        if mixture is None or layer not in mixture.layers:
            counts.append((inner_size, f"features of {model.feed_forward.output}"))
    if mixture is not None:
        counts.append((mixture.expert_size, "features of an expert"))
        if mixture.shared is not None:
            counts.append((mixture.shared.size, "features of the shared expert"))
    for count, what in counts:
        if count % size:
            raise ConfigNotUsable(f"tensor_parallel_size {size} does not divide the model's {count} {what}")
    if kv_heads % size and size % kv_heads:
        raise ConfigNotUsable(
            f"tensor_parallel_size {size} neither divides the model's {kv_heads} key/value heads nor is a multiple of "
            "them"
        )


def worker_config(model: ModelConfig, size: int) -> ModelConfig:
    """The share of `model` that each of `size` workers computes, as a model of its own.

    If there are fewer K/V heads than workers, several workers have the same head.
    """
    attention = model.attention

    def share(heads: LayerHeads) -> LayerHeads:
        return replace(heads, num_kv_heads=max(1, heads.num_kv_heads // size))

    return replace(
        model,
        attention=replace(
            attention,
            num_heads=attention.num_heads // size,
            num_kv_heads=max(1, attention.num_kv_heads // size),
            layer_heads=tuple(map(share, attention.layer_heads)),
        ),
        intermediate_size=model.intermediate_size // size,
        layer_intermediate_sizes=tuple(one // size for one in model.layer_intermediate_sizes),
        mixture=None if model.mixture is None else _worker_mixture(model.mixture, size),
        # Workers do not divide the head for drafts.
        draft_head=None,
    )


def _worker_mixture(mixture: MixtureConfig, size: int) -> MixtureConfig:
    shared = mixture.shared
    return replace(
        mixture,
        expert_size=mixture.expert_size // size,
        shared=None if shared is None else replace(shared, size=shared.size // size),
    )


def module_shards(model: ModelConfig, size: int, worker: int) -> tuple[Shard, ...]:
    """The share of worker `worker` in each of `model.modules`, followed by the linear layers of the experts and the
    norms that adapters can replace.
    """
    group_of = {module: group for group, modules in enumerate(model.module_groups) for module in modules}
    shards = []
    for index, module in enumerate(model.modules):
        group = group_of[index]
        if group in (Group.OUTPUT, Group.DOWN):
            inputs = shares((module.in_features,), size, worker)
            shards.append(Shard(inputs, (range(module.out_features),), is_summed=True))
        elif group == Group.ROUTER:
            shards.append(Shard((range(module.in_features),), (range(module.out_features),)))
        else:
            ranges = (
                _attention_outputs(model, module, size, worker)
                if group == Group.QKV
                else _inner(model, module, size, worker)
            )
            shards.append(Shard((range(module.in_features),), ranges))
    if model.experts is not None:
        *gate_up, down = model.experts.linears
        # The rows of a fused gate and up are those of gate, then those of up.
        parts = [(down.in_features,) * (linear.out_features // down.in_features) for linear in gate_up]
        of_one = [
            Shard((range(linear.in_features),), shares(lengths, size, worker))
            for linear, lengths in zip(gate_up, parts, strict=True)
        ]
        of_one.append(Shard(shares((down.in_features,), size, worker), (range(down.out_features),), is_summed=True))
        shards += of_one * model.experts.num_experts
    for own in worker_config(model, size).norm_shapes:
        # A norm of heads has the same weight for each head.
        width = (range(own.linear.out_features),)
        shards.append(Shard(width, width))
    return tuple(shards)


def vocabulary_share(vocab_size: int, size: int, worker: int) -> range:
    """The tokens whose rows of the head belong to worker `worker`.

    All workers have `ceil(vocab_size / size)` rows, so the last rows may stand for no token.
    """
    share = -(-vocab_size // size)
    return range(min(worker * share, vocab_size), min((worker + 1) * share, vocab_size))


def _attention_outputs(model: ModelConfig, module: LinearShape, size: int, worker: int) -> tuple[range, ...]:
    attention = model.attention
    kv_features = attention.num_kv_heads * attention.head_dim
    # With fewer K/V heads than workers, `kv_size` groups of workers have a head each.
    kv_size = min(size, attention.num_kv_heads)
    kv_worker = worker * kv_size // size
    name = module.name.rpartition(".")[2]
    if name == "q_proj":
        return shares((module.out_features,), size, worker)
    if name in ("k_proj", "v_proj"):
        return shares((module.out_features,), kv_size, kv_worker)
    assert name == "qkv_proj", f"unknown projection {module.name}"
    q_features = module.out_features - 2 * kv_features
    kv = shares((q_features, kv_features, kv_features), kv_size, kv_worker)[1:]
    return (*shares((q_features,), size, worker), *kv)


def _inner(model: ModelConfig, module: LinearShape, size: int, worker: int) -> tuple[range, ...]:
    """The share of the outputs of gate or up, or of both if they are one linear layer."""
    blocks = [model.feed_forward]
    if model.mixture is not None and model.mixture.shared is not None:
        blocks.append(model.mixture.shared.block)
    is_fused = any(block.has_gate and block.inputs == (module.name,) for block in blocks)
    parts = (module.out_features // 2,) * 2 if is_fused else (module.out_features,)
    return shares(parts, size, worker)


def shares(parts: Sequence[int], size: int, index: int) -> tuple[range, ...]:
    """Share `index` of `size` equal shares of each of the consecutive `parts`."""
    begins = (end - part for part, end in zip(parts, accumulate(parts), strict=True))
    return tuple(
        range(begin + index * (part // size), begin + (index + 1) * (part // size))
        for part, begin in zip(parts, begins, strict=True)
    )
