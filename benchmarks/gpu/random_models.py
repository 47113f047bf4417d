"""Random models on the card, random adapters in host memory, and random prompts, for measuring engines."""

from __future__ import annotations

import dataclasses
import json
import tempfile
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from benchmarks.gpu.bench import Bench
from benchmarks.gpu.model import Model
from loramux.adapter_store.formats.packed.pack_target import PackTarget
from loramux.adapter_store.formats.packed.packing import PackedAdapter
from loramux.engine.architectures.model_config import ModelConfig
from loramux.engine.loop.config import pack_target
from loramux.engine.loop.loaded_base import DTYPES
from loramux.kernels.layout import A, AdapterLayout, B, adapter_layout, row_layout

EFFECT = 0.5
"""Magnitude of an adapter's contribution to a linear layer's output, relative to the base's output."""

ALL_MODULES = tuple(range(7))

HYBRID_MODULES = (*ALL_MODULES, 7, 8, 11)
"""All linear layers of a hybrid decoder except the small projections of the gates."""


def config_of(model: Model, max_len: int) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "num_hidden_layers": model.num_layers,
        "hidden_size": model.hidden_size,
        "intermediate_size": model.intermediate_size,
        "num_attention_heads": model.num_heads,
        "num_key_value_heads": model.num_kv_heads,
        "head_dim": model.head_dim,
        "vocab_size": model.vocab_size,
        "max_position_embeddings": max_len,
        "rms_norm_eps": 1e-5,
        **({} if model.experts is None else model.experts.fields),
        **({} if model.hybrid is None else model.hybrid.fields),
    }


@dataclass(frozen=True, slots=True)
class RandomWeights:
    """Random weights that preserve the magnitude of activations. Each tensor's seed is derived from its name."""

    device: torch.device
    dtype: torch.dtype

    def tensor(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        if len(shape) == 1:
            return torch.ones(shape, device=self.device)
        generator = torch.Generator(self.device).manual_seed(zlib.crc32(name.encode()))
        spread = 1.0 if "embed_tokens" in name else shape[1] ** -0.5
        return torch.empty(shape, dtype=self.dtype, device=self.device).normal_(0.0, spread, generator=generator)


class RandomAdapters:
    """Adapters by digest. Adapters added in one call share the same random numbers in host memory, so that thousands of
    adapters fit in a small host's memory. Each adapter is still copied to its own pages. With a GPU, the memory is
    pinned, as in the host tier.
    """

    def __init__(self, bench: Bench, model: Model, dtype: str) -> None:
        self._bench = bench
        self._target = pack_target(model_config(model, 1), dtype)
        self.packed: dict[str, PackedAdapter] = {}

    def make(
        self, digests: Iterable[str], rank: int, modules: Iterable[int] = ALL_MODULES, first_layer: int = 0
    ) -> list[str]:
        """Add an adapter of `rank` under each digest, for these modules in all layers from `first_layer` on."""
        layout = self.layout(rank, modules, first_layer)
        ranks = layout.ranks
        made = PackedAdapter(
            "", layout, (ranks > 0).astype(np.float32), _random_payload(self._bench, self._target, ranks)
        )
        listed = list(digests)
        self.packed |= {digest: dataclasses.replace(made, digest=digest) for digest in listed}
        return listed

    def layout(self, rank: int, modules: Iterable[int] = ALL_MODULES, first_layer: int = 0) -> AdapterLayout:
        """The layout in pages of an adapter with this rank on these modules, from `first_layer` on."""
        ranks = ranks_of(self._target, rank, modules, first_layer)
        return adapter_layout(self._target.geometry, self._target.all_modules, ranks)

    @property
    def page_bytes(self) -> int:
        """Bytes of a page across all layers."""
        return self._target.geometry.total_page_bytes

    def num_pages(self, digest: str) -> int:
        return self.packed[digest].num_pages


def ranks_of(target: PackTarget, rank: int, modules: Iterable[int], first_layer: int = 0) -> npt.NDArray[np.int32]:
    """The ranks of an adapter by layer and module. Modules that only some layers have are 0 in all others."""
    ranks = np.zeros((target.geometry.num_layers, len(target.all_modules)), np.int32)
    for index in modules:
        layers = target.all_modules[index].layers
        ranks[slice(None) if layers is None else list(layers), index] = rank
    ranks[:first_layer] = 0
    return ranks


def _random_payload(bench: Bench, target: PackTarget, ranks: np.ndarray) -> np.ndarray:
    """The pages of a random adapter, uint8 `[num_pages, num_layers, page_bytes]`. Elements outside rows are zero."""
    geometry, E = target.geometry, target.geometry.adapter_elements
    layout = adapter_layout(geometry, target.all_modules, ranks)
    size = (geometry.num_layers, layout.num_pages * E)
    streams = torch.zeros(size, dtype=DTYPES[target.dtype], device=bench.device)
    generator = torch.Generator(bench.device).manual_seed(int(ranks.sum()))
    for layer, m in zip(*np.nonzero(ranks), strict=True):
        rank, module = int(ranks[layer, m]), target.all_modules[m]
        spreads = {A: (module.in_features, module.in_features**-0.5), B: (module.out_features, EFFECT * rank**-0.5)}
        for half, (row_len, spread) in spreads.items():
            padded_len, offset = row_layout(row_len, E).padded_len, int(layout.offsets[layer, m, half])
            rows = streams[layer, offset : offset + rank * padded_len].view(rank, padded_len)
            rows[:, :row_len].normal_(0.0, spread, generator=generator)
    pages = streams.view(geometry.num_layers, layout.num_pages, E).transpose(0, 1).contiguous().view(torch.uint8)
    host = torch.empty(pages.shape, dtype=torch.uint8, pin_memory=bench.device.type == "cuda")
    return host.copy_(pages).numpy()


@contextmanager
def model_directory(model: Model, max_len: int) -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as name:
        (Path(name) / "config.json").write_text(json.dumps(config_of(model, max_len)))
        yield Path(name)


def model_config(model: Model, max_len: int) -> ModelConfig:
    with model_directory(model, max_len) as directory:
        return ModelConfig.load(directory)


def random_prompt(model: Model, num_tokens: int, seed: int) -> tuple[int, ...]:
    return tuple(np.random.default_rng(seed).integers(model.vocab_size, size=num_tokens).tolist())
