"""Loads an engine's base model."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from loramux.adapter_store.formats.packed.pack_target import PackTarget
from loramux.engine.architectures.model_config import ModelConfig
from loramux.engine.decoder.decoder import Decoder
from loramux.engine.decoder.draft_head import DraftHead
from loramux.engine.decoder.weights import WeightSource, open_weights
from loramux.engine.device.backend import Backend, MakeQuantizedExperts, MakeQuantizedLinear
from loramux.engine.drafting.speculation import MAX_ROWS
from loramux.engine.loop.config import EngineConfig, kv_itemsize, pack_target, resolve_dtype, resolve_max_model_len
from loramux.engine.pages.pool_size import in_gib
from loramux.engine.parallel.sharded_weights import ShardedWeights
from loramux.engine.parallel.sharding import worker_config
from loramux.engine.protocol.errors import ConfigNotUsable, DeviceNotUsable, ModelNotSupported
from loramux.kernels.quantized import QuantizedWeight

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def pool_dtypes(config: EngineConfig, dtype: str) -> tuple[torch.dtype, torch.dtype]:
    """The dtypes of K and V and of adapters in the pool. `dtype` is resolved."""
    kv = torch.int8 if config.kv_dtype == "int8" else DTYPES[dtype]
    return kv, DTYPES[dtype] if config.adapter_dtype is None else torch.uint8


@dataclass(frozen=True, slots=True, eq=False)
class LoadedBase:
    """A base model on a device, and what its files and an engine's settings determine.

    If several workers share the base, `decoder` is a worker's share, and `target` describes its pages. `whole_target`
    is the target for which adapters are packed before they are divided.
    """

    config: EngineConfig
    model: ModelConfig
    dtype: str
    max_model_len: int
    target: PackTarget
    whole_target: PackTarget
    backend: Backend
    decoder: Decoder
    head: DraftHead | None
    """The base's own head for drafts, or None if it is not used."""
    activations: str | None
    """The format of 8 bits to which inputs of linear layers are rounded, or None."""
    num_dequantized: int
    """Number of linear layers whose quantised weights no kernel supports. They are dequantised. The experts of a layer
    count once per projection.
    """


class CodedLayers:
    """Counts linear layers with quantised weights: those whose inputs are rounded to 8 bits, and those whose weights
    are dequantised. The experts of a layer count once per projection.
    """

    def __init__(self) -> None:
        self.num_with_byte_inputs = 0
        self.num_dequantized = 0

    def counted(self, backend: Backend) -> Backend:
        """A copy of `backend` that counts the linear layers that it makes."""
        return replace(
            backend,
            make_quantized_linear=self._counted(backend.make_quantized_linear),
            make_quantized_experts=self._counted_experts(backend.make_quantized_experts),
        )

    def _counted(self, make: MakeQuantizedLinear | None) -> Any:
        if make is None:
            return None

        def count(weight: QuantizedWeight, bias: torch.Tensor | None) -> Any:
            return self._note(make(weight, bias), is_quantized=True)

        return count

    def _counted_experts(self, make: MakeQuantizedExperts | None) -> Any:
        if make is None:
            return None

        def count(
            num_experts: int, weights: Iterable[QuantizedWeight | torch.Tensor], bias: torch.Tensor | None
        ) -> Any:
            # Experts with float weights are offered, too. The first expert says what the others are.
            given = iter(weights)
            first = next(given)
            made = make(num_experts, itertools.chain([first], given), bias)
            return self._note(made, is_quantized=isinstance(first, QuantizedWeight))

        return count

    def _note(self, made: Any, *, is_quantized: bool) -> Any:
        self.num_dequantized += made is None and is_quantized
        self.num_with_byte_inputs += getattr(made, "x_bits", None) == 8
        return made


def configured_target(config: EngineConfig) -> PackTarget:
    """The target for which adapters of the configured base are packed. Raises EngineError."""
    model = ModelConfig.load(Path(config.model_dir))
    return pack_target(model, resolve_dtype(config.dtype, model, config.device), config.adapter_dtype, config.kv_dtype)


def load_base(config: EngineConfig, backend: Backend, weights: WeightSource | None = None) -> LoadedBase:
    """Load the configured base, or `weights` in place of its files. Raises EngineError."""
    model = ModelConfig.load(Path(config.model_dir))
    dtype = resolve_dtype(config.dtype, model, config.device)
    max_model_len = resolve_max_model_len(config, model)
    whole_target = target = pack_target(model, dtype, config.adapter_dtype, config.kv_dtype)
    if backend.workers is not None:
        own = worker_config(model, backend.workers.size)
        target = pack_target(own, dtype, config.adapter_dtype, config.kv_dtype)
    layers = CodedLayers()
    decoder, head = load_decoder(config, model, dtype, max_model_len, weights, layers.counted(backend))
    format_of_bytes, device = ("int8", "CPU") if config.device == "cpu" else ("fp8", "GPU")
    if config.activations == format_of_bytes and layers.num_with_byte_inputs == 0:
        raise ConfigNotUsable(
            f"this {device} cannot multiply any of the base's weights in {format_of_bytes} (docs/quantization.md lists "
            "the formats): omit --activations"
        )
    activations = format_of_bytes if layers.num_with_byte_inputs else None
    return LoadedBase(
        config,
        model,
        dtype,
        max_model_len,
        target,
        whole_target,
        backend,
        decoder,
        head,
        activations,
        layers.num_dequantized,
    )


def load_decoder(
    config: EngineConfig,
    model: ModelConfig,
    dtype: str,
    max_model_len: int,
    weights: WeightSource | None,
    backend: Backend,
) -> tuple[Decoder, DraftHead | None]:
    """The decoder, and its head for drafts if the settings want it. Raises EngineError."""
    memory = backend.accelerator.memory()
    itemsize = kv_itemsize(dtype, config.kv_dtype)
    try:
        if weights is not None:
            decoder = Decoder(model, weights, DTYPES[dtype], max_model_len, backend, itemsize)
            return decoder, _load_head(config, decoder, weights, dtype, backend, itemsize, has_tensors=True)
        quantized_dir = None if config.quantized_dir is None else Path(config.quantized_dir)
        with open_weights(Path(config.model_dir), quantized_dir, model.draft_tensors) as opened:
            if (workers := backend.workers) is not None:
                own = replace(worker_config(model, workers.size), tied_embeddings=False)
                sharded = ShardedWeights(opened, model, workers.size, workers.worker)
                return Decoder(own, sharded, DTYPES[dtype], max_model_len, backend, itemsize), None
            # A quantised head is a separate weight, even if the float model's head is tied to the embedding.
            is_tied = model.tied_embeddings and not opened.has_quantized_head
            own = replace(model, tied_embeddings=is_tied)
            decoder = Decoder(own, opened, DTYPES[dtype], max_model_len, backend, itemsize)
            has_tensors = model.draft_head is not None and opened.has_any(f"{model.draft_head.prefix}.")
            return decoder, _load_head(config, decoder, opened, dtype, backend, itemsize, has_tensors=has_tensors)
    except torch.OutOfMemoryError as error:
        if memory is None:
            raise
        raise DeviceNotUsable(
            f"the model does not fit on the GPU, which had {in_gib(memory.free)} of {in_gib(memory.total)} free: "
            "stop other programs on the GPU, or use a larger GPU"
        ) from error


def _load_head(
    config: EngineConfig,
    decoder: Decoder,
    weights: WeightSource,
    dtype: str,
    backend: Backend,
    kv_itemsize: int,
    *,
    has_tensors: bool,
) -> DraftHead | None:
    """The base's own head for drafts, or None if the settings do not want it. `has_tensors` is True if the files
    contain tensors of the head that `config.json` names.

    If the head cannot be used, `auto` prints the reason on standard error. `head` raises ConfigNotUsable, or
    ModelNotSupported if the tensors do not fit the base. If there can be no drafts at all, `text` and `auto` print why.
    """
    max_rows = max_draft_rows(config, decoder.config, backend)
    if config.speculate in ("text", "auto") and not max_rows:
        reason = f"{decoder.config.architecture} has layers with a recurrent state"
        print(f"--speculate {config.speculate} has no effect on a GPU, because {reason}", file=sys.stderr)
        return None
    if config.speculate not in ("head", "auto"):
        return None
    problem = _head_problem(decoder.config, max_rows, has_tensors=has_tensors)
    if problem is None:
        try:
            return DraftHead(decoder, weights, DTYPES[dtype], backend, kv_itemsize)
        except ModelNotSupported as error:
            if config.speculate == "head":
                raise
            problem = str(error)
    elif config.speculate == "head":
        raise ConfigNotUsable(f"--speculate head cannot be used, because {problem}: use --speculate text or auto")
    print(f"--speculate auto drafts from the text, and not from the base's own head: {problem}", file=sys.stderr)
    return None


def max_draft_rows(config: EngineConfig, model: ModelConfig, backend: Backend) -> int:
    """Maximum number of rows of a step with drafts, or 0 if steps have no drafts."""
    if model.delta is not None and backend.sample_tokens is not None:
        # Captured steps do not keep what a state needs to go back.
        return 0
    # On a GPU, a step samples at most one token for each sequence that can run.
    most = MAX_ROWS if backend.sample_tokens is None else config.max_sequences
    return min(MAX_ROWS, most, config.max_batch_tokens)


def _head_problem(model: ModelConfig, max_rows: int, *, has_tensors: bool) -> str | None:
    """Why the base's own head for drafts cannot be used, or None. A step with drafts has at most `max_rows`."""
    if model.delta is not None:
        return f"{model.architecture} has layers with a recurrent state, and the head's drafts do not support them"
    if any(window is not None for window in model.attention.windows):
        return "its layers have windows"
    if model.draft_head is None:
        return f"config.json names no head for drafts that loramux supports in {model.architecture}"
    if not has_tensors:
        return f"the model's files have no tensor of its head for drafts, {model.draft_head.prefix}"
    if max_rows < 2:
        return "a draft needs a second row in a step, but max_sequences on a GPU or max_batch_tokens is 1"
    return None
