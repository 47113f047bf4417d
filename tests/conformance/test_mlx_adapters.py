"""Converted adapters of mlx-lm have the logits of the base with mlx-lm's products added to its weights."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from loramux.adapter_store.formats.quantization.base_weights import BaseWeights
from loramux.engine.architectures.model_config import ModelConfig
from loramux.engine.loop.config import pack_target
from loramux.engine.offline.local_adapter import read_adapter
from loramux.engine.protocol.messages import Add, SamplingParams
from tests.adapter_store.formats.mlx.mlx_files import random_pair, write_tensors
from tests.conformance.parity import TOLERANCE, Recorder, Subject, run
from tests.conformance.tiny_models import SMALL_SHAPE, VOCAB_SIZE, make_base

RANK, SCALE = 3, 2.5


@dataclass(frozen=True)
class Family:
    """mlx-lm's name of a layer's experts, and how transformers stacks their gate and up."""

    experts: str
    is_transposed: bool = False
    alternates: bool = False


FAMILIES = {
    "qwen3-moe": Family("mlp.switch_mlp"),
    "mixtral": Family("block_sparse_moe.switch_mlp"),
    # Its embedding and head are tied.
    "granite-moe": Family("block_sparse_moe.switch_mlp"),
    "gpt-oss": Family("mlp.experts", is_transposed=True, alternates=True),
}


@torch.no_grad()
def add_random_loras(base: Any, family: Family) -> dict[str, np.ndarray]:
    """Add the products of random LoRAs to the base's weights, and return mlx-lm's tensors."""
    generator = np.random.default_rng(0)
    tensors: dict[str, np.ndarray] = {}

    def product(module: str, *shape: int) -> torch.Tensor:
        pair = random_pair(generator, *shape, rank=RANK)
        tensors.update({f"{module}.{leaf}": values for leaf, values in pair.items()})
        a, b = (torch.from_numpy(pair[leaf]) for leaf in ("lora_a", "lora_b"))
        return SCALE * (b @ a if len(shape) == 3 else a @ b)

    for name, module in base.named_modules():
        if name.endswith("q_proj"):
            module.weight += product(name, *module.weight.shape[::-1]).T
        elif name.endswith("embed_tokens"):
            module.weight += product(name, *module.weight.shape)
        elif name.endswith(".experts"):
            above = f"{name.rpartition('.')[0].rpartition('.')[0]}.{family.experts}"
            down, gate_up = (
                weight.data.transpose(1, 2) if family.is_transposed else weight.data
                for weight in (module.down_proj, module.gate_up_proj)
            )
            num_experts, hidden_size, size = down.shape
            down += product(f"{above}.down_proj", num_experts, size, hidden_size)
            for index, part in enumerate(("gate_proj", "up_proj")):
                rows = slice(index, None, 2) if family.alternates else slice(index * size, (index + 1) * size)
                gate_up[:, rows] += product(f"{above}.{part}", num_experts, hidden_size, size)
    return tensors


@pytest.mark.parametrize("name", FAMILIES)
def test_experts_and_embeddings_have_the_logits_of_mlx(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = make_base(name, tmp_path / "base", SMALL_SHAPE)
    reference = copy.deepcopy(base)
    tensors = add_random_loras(reference, FAMILIES[name])
    assert sum(".lora_a" in key and ".layers.0." in key for key in tensors) == 4
    directory = write_tensors(tmp_path / "mlx", tensors, rank=RANK, scale=SCALE)
    target = pack_target(ModelConfig.load(tmp_path / "base"), "float32")
    packed = read_adapter(directory, target, BaseWeights(tmp_path / "base"), None, {}).packed
    assembled = Subject(tmp_path / "base", None, {}, {packed.digest: packed}, {}).assemble()
    recorder = Recorder(assembled.engine, monkeypatch)
    prompt = tuple(range(2, VOCAB_SIZE, 29))
    sampling = SamplingParams(temperature=0.0, ignore_eos=True)
    for digest, model in ((packed.digest, reference), (None, base)):
        add = Add(sequence_id=str(digest), prompt=prompt, max_tokens=1, sampling=sampling, digest=digest)
        assembled.engine.add(b"", add)
        run(assembled.engine)
        with torch.no_grad():
            expected = model(input_ids=torch.tensor([prompt])).logits[0, -1]
        difference = (recorder.by_sequence[str(digest)][0] - expected).abs().max() / expected.abs().max()
        assert difference <= TOLERANCE
    assembled.adapters.close()
