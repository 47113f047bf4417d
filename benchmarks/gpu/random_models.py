"""Random models on the card, random adapters in host memory, and random prompts, for measuring engines."""

from __future__ import annotations

import dataclasses
import json
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from safetensors.torch import save_file

from benchmarks.gpu.bench import Bench
from benchmarks.gpu.model import Model
from loramux.adapter_store.formats.packed.module_places import A_SUFFIX, B_SUFFIX, TENSOR_PREFIX, module_key
from loramux.adapter_store.formats.packed.pack_target import FP8, PackTarget
from loramux.adapter_store.formats.packed.packing import PackedAdapter
from loramux.engine.architectures.model_config import ModelConfig
from loramux.engine.loop.config import pack_target
from loramux.engine.loop.loaded_base import DTYPES
from loramux.kernels.layout import A, AdapterLayout, B, LinearShape, row_layout

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


def llama_config(model: Model, max_len: int, dtype: torch.dtype) -> dict[str, Any]:
    """The whole `config.json` of a Llama, for programs that need more fields than loramux."""
    return config_of(model, max_len) | {
        "torch_dtype": str(dtype).removeprefix("torch."),
        "tie_word_embeddings": False,
        "model_type": "llama",
        "bos_token_id": 1,
        "eos_token_id": 2,
    }


class RandomAdapters:
    """Adapters by digest. Adapters added in one call share the same random numbers in host memory, so that thousands of
    adapters fit in a small host's memory. Each adapter is still copied to its own pages. With a GPU, the memory is
    pinned, as in the host tier.
    """

    def __init__(self, bench: Bench, model: Model, dtype: str, adapter_dtype: Literal["fp8"] | None = None) -> None:
        self._bench = bench
        self.target = pack_target(model_config(model, 1), dtype, adapter_dtype)
        self.packed: dict[str, PackedAdapter] = {}

    def make(
        self,
        digests: Iterable[str],
        rank: int,
        modules: Iterable[int] = ALL_MODULES,
        first_layer: int = 0,
        seed: int = 0,
    ) -> list[str]:
        """Add an adapter of `rank` under each digest, for these modules in all layers from `first_layer` on.

        Adapters of the same rank and modules are equal unless they have different seeds.
        """
        layout = self.layout(rank, modules, first_layer)
        ranks = layout.ranks
        payload = _random_payload(self._bench, self.target, layout, seed)
        no_outer = np.zeros(len(self.target.outer_modules), np.float32)
        made = PackedAdapter("", layout, _scales(self.target, ranks), payload, no_outer)
        listed = list(digests)
        self.packed |= {digest: dataclasses.replace(made, digest=digest) for digest in listed}
        return listed

    def layout(self, rank: int, modules: Iterable[int] = ALL_MODULES, first_layer: int = 0) -> AdapterLayout:
        """The layout in pages of an adapter with this rank on these modules, from `first_layer` on."""
        return self.target.layout(ranks_of(self.target, rank, modules, first_layer))

    @property
    def page_bytes(self) -> int:
        """Bytes of a page across all layers."""
        return self.target.geometry.total_page_bytes

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


def _scales(target: PackTarget, ranks: npt.NDArray[np.int32]) -> npt.NDArray[np.float32]:
    """The scale of each module, by layer; 0 for an absent module."""
    scales = (ranks > 0).astype(np.float32)
    if target.dtype == FP8:
        in_features = np.array([module.in_features for module in target.all_modules])
        scales *= EFFECT * (in_features * np.maximum(ranks, 1)) ** -0.5
    return scales


def _random_payload(bench: Bench, target: PackTarget, layout: AdapterLayout, seed: int) -> np.ndarray:
    """The pages of a random adapter, uint8 `[num_pages, num_layers, page_bytes]`. Elements outside rows are zero."""
    geometry = target.geometry
    size = (geometry.num_layers, layout.num_pages * geometry.adapter_elements)
    is_fp8 = target.dtype == FP8
    streams = torch.zeros(size, dtype=torch.uint8 if is_fp8 else DTYPES[target.dtype], device=bench.device)
    generator = torch.Generator(bench.device).manual_seed(int(layout.ranks.sum()) + seed)
    for _, module, half, rows in _rows_of(target, layout, streams):
        if is_fp8:
            # Codes of values with a spread of 1. `_scales` makes their products as large as those of floats.
            values = torch.empty(rows.shape, device=rows.device).normal_(generator=generator)
            rows.copy_(values.to(torch.float8_e4m3fn).view(torch.uint8))
        else:
            spread = module.in_features**-0.5 if half == A else EFFECT * len(rows) ** -0.5
            rows.normal_(0.0, spread, generator=generator)
    pages = streams.view(geometry.num_layers, layout.num_pages, -1).transpose(0, 1).contiguous().view(torch.uint8)
    host = torch.empty(pages.shape, dtype=torch.uint8, pin_memory=bench.device.type == "cuda")
    return host.copy_(pages).numpy()


def _rows_of(
    target: PackTarget, layout: AdapterLayout, streams: torch.Tensor
) -> Iterator[tuple[int, LinearShape, int, torch.Tensor]]:
    """Each part of an adapter in its streams `[num_layers, num_elements]`: layer, module, A or B, and the part's rows:
    A `[rank, in_features]` or B transposed `[rank, out_features]`.
    """
    for layer, m in zip(*np.nonzero(layout.ranks), strict=True):
        rank, module = int(layout.ranks[layer, m]), target.all_modules[m]
        for half, row_len in ((A, module.in_features), (B, module.out_features)):
            padded_len = row_layout(row_len, target.geometry.adapter_elements).padded_len
            offset = int(layout.offsets[layer, m, half])
            rows = streams[layer, offset : offset + rank * padded_len].view(rank, padded_len)
            yield int(layer), module, half, rows[:, :row_len]


def write_peft(adapters: RandomAdapters, digest: str, directory: Path) -> None:
    """Write an adapter as the files of a PEFT directory. All of its modules must have the same rank."""
    packed, target = adapters.packed[digest], adapters.target
    pages = torch.from_numpy(packed.payload).view(DTYPES[target.dtype])
    streams = pages.transpose(0, 1).reshape(target.geometry.num_layers, -1)
    tensors: dict[str, torch.Tensor] = {}
    for layer, module, half, rows in _rows_of(target, packed.layout, streams):
        suffix, matrix = (A_SUFFIX, rows) if half == A else (B_SUFFIX, rows.T)
        tensors[TENSOR_PREFIX + module_key(layer, module) + suffix] = matrix.contiguous()
    directory.mkdir(parents=True)
    save_file(tensors, directory / "adapter_model.safetensors")
    rank = int(packed.layout.ranks.max())
    names = {target.all_modules[m].name.rpartition(".")[2] for m in np.nonzero(packed.layout.ranks)[1]}
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": rank,
        "lora_alpha": rank,
        "target_modules": sorted(names),
        "base_model_name_or_path": "base",
    }
    (directory / "adapter_config.json").write_text(json.dumps(config))


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
