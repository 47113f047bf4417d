"""The weights of an int4 model that get 8 bits."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from loramux.adapter_store.formats.files.mapped_tensors import MappedTensor, map_directory
from loramux.engine.quantizing.methods import INT4, SENSITIVE_METHOD
from loramux.engine.quantizing.sensitivity import EXTRA_BYTES, sensitive_weights

GROUP = 32


def on_a_grid(out_features: int, in_features: int) -> torch.Tensor:
    """Weights that 4 bits represent exactly."""
    codes = torch.randint(0, 16, (out_features, in_features))
    codes.view(-1, GROUP)[:, :2] = torch.tensor([0, 15])
    return (codes - 8) / 64


def stored(directory: Path, weights: Mapping[str, torch.Tensor]) -> dict[str, MappedTensor]:
    save_file(dict(weights), directory / "model.safetensors")
    return map_directory(directory)


def test_only_weights_that_lose_with_4_bits_get_8(tmp_path: Path) -> None:
    tensors = stored(tmp_path, {f"{i}": on_a_grid(64, 128) if i != 7 else torch.randn(64, 128) for i in range(20)})
    assert sensitive_weights([[name] for name in tensors], tensors, GROUP) == {"7"}


def test_weights_of_one_product_stay_together(tmp_path: Path) -> None:
    tensors = stored(tmp_path, {f"{i}": on_a_grid(64, 128) if i != 7 else torch.randn(64, 128) for i in range(40)})
    pairs = [[f"{i}", f"{i + 1}"] for i in range(0, 40, 2)]
    assert sensitive_weights(pairs, tensors, GROUP) == {"6", "7"}


@pytest.mark.parametrize("count", [10, 40])
def test_the_weights_in_8_bits_fit_into_their_share(tmp_path: Path, count: int) -> None:
    tensors = stored(tmp_path, {f"{i}": torch.randn(64, 64 + 32 * (i % 3)) for i in range(count)})
    chosen = sensitive_weights([[name] for name in tensors], tensors, GROUP)
    plain = {name: INT4.nbytes(tensor.shape[0], tensor.shape[1], GROUP) for name, tensor in tensors.items()}
    better = {name: SENSITIVE_METHOD.nbytes(tensors[name].shape[0], tensors[name].shape[1], None) for name in chosen}
    added = sum(better[name] - plain[name] for name in chosen)
    assert chosen
    assert 0.4 * EXTRA_BYTES * sum(plain.values()) < added <= EXTRA_BYTES * sum(plain.values())


def test_weights_that_are_not_finite_are_left_to_the_encoder(tmp_path: Path) -> None:
    weight = torch.randn(64, 128)
    weight[0, 0] = torch.inf
    tensors = stored(tmp_path, {f"{i}": on_a_grid(64, 128) if i else weight for i in range(20)})
    assert sensitive_weights([[name] for name in tensors], tensors, GROUP) == set()
