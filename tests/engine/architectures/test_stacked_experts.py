from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from loramux.engine.decoder.weights import open_weights
from loramux.engine.protocol.errors import ModelNotSupported

EXPERTS = "model.layers.0.mlp.experts"


@pytest.fixture
def weights() -> dict[str, torch.Tensor]:
    """Gate, up and down of two experts."""
    generator = torch.Generator().manual_seed(1)
    shapes = {"gate_proj": (8, 6), "up_proj": (8, 6), "down_proj": (6, 8)}
    return {
        f"{EXPERTS}.{expert}.{name}.weight": torch.randn(shape, generator=generator)
        for expert in range(2)
        for name, shape in shapes.items()
    }


def stacks(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    def stack(*names: str) -> torch.Tensor:
        parts = (torch.cat([weights[f"{EXPERTS}.{expert}.{name}.weight"] for name in names]) for expert in range(2))
        return torch.stack(list(parts))

    return {f"{EXPERTS}.gate_up_proj": stack("gate_proj", "up_proj"), f"{EXPERTS}.down_proj": stack("down_proj")}


@pytest.mark.parametrize("is_transposed", [False, True], ids=["rows", "columns"])
def test_a_stack_yields_the_weight_of_each_expert(
    is_transposed: bool, weights: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    stored = stacks(weights)
    if is_transposed:
        stored = {name: stack.transpose(1, 2).contiguous() for name, stack in stored.items()}
    save_file(stored, tmp_path / "model.safetensors")
    with open_weights(tmp_path) as opened:
        for name, expected in weights.items():
            assert torch.equal(torch.as_tensor(opened.tensor(name, tuple(expected.shape))), expected)


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        pytest.param(f"{EXPERTS}.2.down_proj.weight", (6, 8), id="expert 2 of 2"),
        pytest.param(f"{EXPERTS}.0.down_proj.weight", (6, 16), id="other size"),
    ],
)
def test_a_stack_without_the_weight_is_refused(
    name: str, shape: tuple[int, ...], weights: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    save_file(stacks(weights), tmp_path / "model.safetensors")
    with (
        pytest.raises(ModelNotSupported, match=r"has shape \[2, 6, 8\], which does not fit expert"),
        open_weights(tmp_path) as opened,
    ):
        opened.tensor(name, shape)
