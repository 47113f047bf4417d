"""Reads one worker's share of a model's tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from loramux.engine.architectures.model_config import ModelConfig
from loramux.engine.architectures.weight_files import EMBEDDING, HEAD, HEAD_BIAS
from loramux.engine.decoder.weights import Weights
from loramux.engine.parallel.sharding import module_shards, vocabulary_share


@dataclass(frozen=True, slots=True)
class _Part:
    """The part of a stored tensor of `shape` that a worker reads: `ranges` along `axis`, then rows of zeros up to
    `num_rows`.
    """

    name: str
    shape: tuple[int, ...]
    axis: int
    ranges: Sequence[range]
    num_rows: int


class ShardedWeights:
    """The part of a model's tensors that worker `worker` of `size` needs. No other part is read.

    The bias of a layer whose outputs are added up belongs to worker 0, and is zero in other workers. A head that is
    tied to the embedding consists of rows of the embedding. Rows of the head that stand for no token are zero.
    """

    def __init__(self, weights: Weights, model: ModelConfig, size: int, worker: int) -> None:
        self._weights = weights
        self._parts: dict[str, _Part] = {}
        self._zeros: set[str] = set()
        shards = module_shards(model, size, worker)
        for module, shard in zip(model.modules, shards, strict=False):
            whole = (module.out_features, module.in_features)
            for layer in (one for one in range(model.num_layers) if module.is_in(one)):
                name = f"model.layers.{layer}.{module.name}"
                if shard.is_summed:
                    self._add(f"{name}.weight", whole, 1, shard.inputs)
                    if worker > 0:
                        self._zeros.add(f"{name}.bias")
                else:
                    self._add(f"{name}.weight", whole, 0, shard.outputs)
                    self._add(f"{name}.bias", whole[:1], 0, shard.outputs)
        tokens, share = [vocabulary_share(model.vocab_size, size, worker)], -(-model.vocab_size // size)
        stored_head = EMBEDDING if model.tied_embeddings else HEAD
        self._parts[HEAD] = _Part(stored_head, (model.vocab_size, model.hidden_size), 0, tokens, share)
        self._parts[HEAD_BIAS] = _Part(HEAD_BIAS, (model.vocab_size,), 0, tokens, share)

    def tensor(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """The worker's part of a tensor, which has the given shape."""
        part = self._parts.get(name)
        if part is None:
            tensor = self._weights.tensor(name, shape)
            assert isinstance(tensor, torch.Tensor), "quantised weights are refused"
            return torch.zeros_like(tensor) if name in self._zeros else tensor
        found = self._weights.part(part.name, part.shape, part.axis, part.ranges)
        if len(found) < part.num_rows:
            found = torch.cat([found, found.new_zeros(part.num_rows - len(found), *found.shape[1:])])
        assert found.shape == shape
        return found

    def _add(self, name: str, whole: tuple[int, ...], axis: int, ranges: Sequence[range]) -> None:
        num_rows = sum(map(len, ranges)) if axis == 0 else whole[0]
        self._parts[name] = _Part(name, whole, axis, ranges, num_rows)
