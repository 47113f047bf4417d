"""The base's own head for drafts (multi-token prediction)."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from loramux.adapter_store.formats.quantization.parts import CodedWeight
from loramux.engine.decoder.attention import Attention
from loramux.engine.decoder.decoder import Decoder
from loramux.engine.decoder.decoder_step import DecoderStep
from loramux.engine.decoder.kv_layout import kv_layout
from loramux.engine.decoder.layer_adapters import AdaptableLinear, LayerAdapters
from loramux.engine.decoder.layer_loading import LayerLoader, module_group
from loramux.engine.decoder.layers import Residual
from loramux.engine.decoder.norms import AdaptableNorm
from loramux.engine.decoder.placement import Placement
from loramux.engine.decoder.weights import WeightSource
from loramux.engine.device.backend import Backend
from loramux.engine.sequences.batch import StepInputs
from loramux.engine.sequences.layer_groups import ALL_GROUPS, LayerGroups
from loramux.kernels.dispatch import Kernels, KernelShapes
from loramux.kernels.layout import LinearShape
from loramux.kernels.tables import AdapterTables, ModuleGroup

LAYER = "model.layers.0"
"""Prefix of the tensors of the only layer of `ModelConfig.draft_layer`."""

_GROUPS = int(ALL_GROUPS & ~(LayerGroups.EXPERTS_GATE_UP | LayerGroups.EXPERTS_DOWN))
"""The module groups of the head that drafters can change."""


@dataclass(frozen=True, slots=True)
class _HeadWeights:
    """The head's tensors under the names that they would have in a decoder of one layer."""

    weights: WeightSource
    prefix: str

    def tensor(self, name: str, shape: tuple[int, ...]) -> torch.Tensor | CodedWeight:
        return self.weights.tensor(self.prefix + name.removeprefix(LAYER), shape)


class DraftHead:
    """Drafts the token after the next one: see `DraftHeadNames`.

    Its layer has K and V of its own, in a pool that `kernels` read and write. They are in the same pages, by number, as
    the K and V of the base, at the position of the state that the head has read. Adapters change the states. A drafter,
    the part of an adapter that is for the head, also changes the head's linear layers (`ModelConfig.draft_modules`).

    Raises ModelNotSupported if a tensor is missing or has another shape than the base's configuration says.
    """

    def __init__(
        self, decoder: Decoder, weights: WeightSource, dtype: torch.dtype, backend: Backend, kv_itemsize: int
    ) -> None:
        names, own = decoder.config.draft_head, decoder.config.draft_layer
        assert names is not None
        self._names, self._decoder = names, decoder
        self.config = own
        accelerator = backend.accelerator
        allocated_before = accelerator.allocated_bytes() or 0
        place = Placement(_HeadWeights(weights, names.prefix), dtype, backend, own)
        size = own.hidden_size
        self._embedding_norm, self._state_norm, final_norm = (
            place.norm(f"{LAYER}.{name}", size) for name in (names.embedding_norm, names.state_norm, names.final_norm)
        )
        self._final_norm = AdaptableNorm(final_norm, None)
        projection = LinearShape(names.projection, 2 * size, size)
        self._projection = AdaptableLinear(
            place.linear(LAYER, [projection], has_bias=False),
            ModuleGroup((len(own.modules),), 2 * size, (size,), (0,)),
            int(LayerGroups.INPUT_PROJECTION),
            None,
        )
        cache = kv_layout(own, own.stretched_model_len, kv_itemsize)
        # All layers of the base have one rotary embedding, and the head has the same.
        self._layer = LayerLoader(own, place, 0, rotary=0, window=None, cache=cache).load()
        self.num_bytes = (accelerator.allocated_bytes() or 0) - allocated_before
        """Bytes of the weights, or 0 if the device does not count what is allocated."""

    @property
    def shapes(self) -> KernelShapes:
        """The shapes that the kernels over the head's pool must support."""
        own = self.config
        groups = [module_group(own.modules, members) for members in own.module_groups if members]
        return KernelShapes(groups=(*groups, self._projection.group), attention=(self._mixer.spec,))

    @property
    def _mixer(self) -> Attention:
        mixer = self._layer.attention.mixer
        assert isinstance(mixer, Attention), "a base with a head for drafts has attention in all layers"
        return mixer

    def states(self, total: torch.Tensor, normed: torch.Tensor) -> torch.Tensor:
        """What the head reads of `Decoder.states`."""
        return normed if self._names.reads_normed else total

    @torch.inference_mode()
    def store(
        self,
        inputs: StepInputs,
        states: torch.Tensor,
        next_tokens: torch.Tensor,
        kernels: Kernels,
        tables: AdapterTables,
        has_drafter: bool,
    ) -> None:
        """Store the head's K and V of all rows of a step, without computing the head's output.

        `states` is `[num_tokens, hidden_size]`. `next_tokens` `[num_tokens]` is the token after each row. `tables` is
        `AdapterTables.drafter`. Without `has_drafter`, no adapter of the step has a drafter.
        """
        residual, step, adapters = self._begin(
            inputs, states, next_tokens, kernels, tables, has_drafter, has_outputs=False
        )
        attention = self._layer.attention
        self._mixer.store(attention.qkv(residual.normed(attention.norm, adapters), adapters), step, adapters)

    @torch.inference_mode()
    def logits(
        self,
        inputs: StepInputs,
        states: torch.Tensor,
        next_tokens: torch.Tensor,
        kernels: Kernels,
        tables: AdapterTables,
        has_drafter: bool,
    ) -> torch.Tensor:
        """Logits of the token after each row's next token, `[num_tokens, vocab_size]`. Also does what `store` does."""
        residual, step, adapters = self._begin(
            inputs, states, next_tokens, kernels, tables, has_drafter, has_outputs=True
        )
        self._layer(residual, step, adapters)
        return self._decoder.logits(residual.normed(self._final_norm, adapters))

    def _begin(
        self,
        inputs: StepInputs,
        states: torch.Tensor,
        next_tokens: torch.Tensor,
        kernels: Kernels,
        tables: AdapterTables,
        has_drafter: bool,
        *,
        has_outputs: bool,
    ) -> tuple[Residual, DecoderStep, LayerAdapters]:
        """What the head's layer reads."""
        embedded = self._embedding_norm(kernels, self._decoder.base_embeddings(next_tokens))
        state = self._state_norm(kernels, states)
        parts = (state, embedded) if self._names.state_first else (embedded, state)
        adapters = LayerAdapters(
            kernels,
            tables,
            inputs.slots,
            inputs.segments,
            groups=_GROUPS if has_drafter else 0,
            replaces_norms=False,
            expands_first=False,
            layer=0,
        )
        x = self._projection(torch.cat(parts, dim=1), adapters)
        return Residual(x), self._decoder.step(inputs, x, kernels, has_outputs=has_outputs), adapters
