"""The kinds of decoder layers, which differ in how their blocks read and change the residual."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from loramux.engine.decoder.altup import AltUpLayer
from loramux.engine.decoder.attention import Attention
from loramux.engine.decoder.decoder_step import DecoderStep
from loramux.engine.decoder.delta_net import DeltaNet
from loramux.engine.decoder.feed_forward import FeedForward
from loramux.engine.decoder.layer_adapters import AdaptableLinear, LayerAdapters
from loramux.engine.decoder.layer_inputs import LayerInput
from loramux.engine.decoder.mixture import Mixture
from loramux.engine.decoder.norms import AdaptableNorm
from loramux.kernels.tables import ModuleGroup


@dataclass(slots=True, eq=False)
class Residual:
    """The residual of a step's tokens, which each layer changes.

    `total` is `[num_tokens, hidden_size]`. `pending` is the output of the last block if it still has to be added,
    because one kernel adds and normalises. With AltUp, layers read and change `streams` `[num_streams, num_tokens,
    hidden_size]` instead.
    """

    total: torch.Tensor
    pending: torch.Tensor | None = None
    streams: torch.Tensor | None = None

    def normed(self, norm: AdaptableNorm, adapters: LayerAdapters) -> torch.Tensor:
        """Add `pending`, and return the norm of the sum."""
        if self.pending is None:
            return norm(self.total, adapters)
        y = norm.norm.add(adapters.kernels, self.pending, self.total)
        self.pending = None
        return adapters.replace_norm(y, norm.group) if adapters.replaces_norms else y

    def added(self) -> torch.Tensor:
        """Add `pending`, and return `total`."""
        if self.pending is not None:
            self.total.add_(self.pending)
            self.pending = None
        return self.total

    def rows(self, rows: slice | torch.Tensor) -> Residual:
        return Residual(self.total[rows], None if self.pending is None else self.pending[rows])


@dataclass(frozen=True, slots=True, eq=False)
class AttentionBlock:
    """Attention or a gated delta rule, between its fused input projections and its output projection.

    The layer normalises the block's input with `norm`. `output_norm` and `scale` apply to the block's output.
    """

    norm: AdaptableNorm
    qkv: AdaptableLinear
    mixer: Attention | DeltaNet
    o: AdaptableLinear
    output_norm: AdaptableNorm | None
    scale: float

    def __call__(self, x: torch.Tensor, step: DecoderStep, adapters: LayerAdapters) -> torch.Tensor:
        y = self.o(self.mixer(self.qkv(x, adapters), step, adapters), adapters)
        if self.output_norm is not None:
            y = self.output_norm(y, adapters)
        return y if self.scale == 1.0 else y.mul_(self.scale)


@dataclass(frozen=True, slots=True, eq=False)
class FeedForwardBlock:
    """A feed-forward block or a mixture of experts, with the norms and the scale of `AttentionBlock`."""

    norm: AdaptableNorm
    inner: FeedForward | Mixture
    output_norm: AdaptableNorm | None
    scale: float

    def __call__(
        self, x: torch.Tensor, residual: torch.Tensor, step: DecoderStep, adapters: LayerAdapters
    ) -> torch.Tensor:
        y = self.inner(x, residual, step, adapters)
        if self.output_norm is not None:
            y = self.output_norm(y, adapters)
        return y if self.scale == 1.0 else y.mul_(self.scale)


@dataclass(frozen=True, slots=True, eq=False)
class DecoderLayer(ABC):
    """The weights of a layer of any kind.

    `norm_groups` has the modules with which adapters replace the layer's norms, by the norm's name. `layer_input` adds
    a projection of the layer's own input embedding to the layer's output, or is None.
    """

    norm_groups: Mapping[str, ModuleGroup]
    attention: AttentionBlock
    feed_forward: FeedForwardBlock
    layer_input: LayerInput | None

    @abstractmethod
    def __call__(self, residual: Residual, step: DecoderStep, adapters: LayerAdapters) -> None: ...

    @property
    def groups(self) -> tuple[ModuleGroup, ...]:
        """The modules that adapters can target."""
        attention = (self.attention.qkv.group, self.attention.o.group)
        own = () if self.layer_input is None else self.layer_input.groups
        return *attention, *self.feed_forward.inner.groups, *own, *self.norm_groups.values()

    @property
    def launches(self) -> tuple[object, ...]:
        """A key that is equal for layers that launch the same kernels."""
        mixer, inner = self.attention.mixer, self.feed_forward.inner
        attention = (mixer.spec, mixer.stores_kv) if isinstance(mixer, Attention) else None
        return attention, type(inner), isinstance(inner, Mixture) and inner.shared is not None


class SequentialLayer(DecoderLayer):
    """The feed-forward block reads the sum of the residual and the attention block's output."""

    __slots__ = ()

    def __call__(self, residual: Residual, step: DecoderStep, adapters: LayerAdapters) -> None:
        x = residual.normed(self.attention.norm, adapters)
        residual.pending = self.attention(x, step, adapters)
        x = residual.normed(self.feed_forward.norm, adapters)
        residual.pending = self.feed_forward(x, residual.total, step, adapters)


class ParallelLayer(DecoderLayer):
    """Both blocks read the same normalised residual."""

    __slots__ = ()

    def __call__(self, residual: Residual, step: DecoderStep, adapters: LayerAdapters) -> None:
        x = residual.normed(self.attention.norm, adapters)
        attended = self.attention(x, step, adapters)
        residual.pending = self.feed_forward(x, residual.total, step, adapters).add_(attended)


@dataclass(frozen=True, slots=True, eq=False)
class ScaledLayer(SequentialLayer):
    """A sequential layer that ends with its own input embedding, and then multiplies the residual by `scalar`."""

    scalar: float

    def __call__(self, residual: Residual, step: DecoderStep, adapters: LayerAdapters) -> None:
        SequentialLayer.__call__(self, residual, step, adapters)
        if self.layer_input is not None:
            residual.pending = self.layer_input(residual.added(), step, adapters)
        if self.scalar != 1.0:
            residual.added().mul_(self.scalar)


@dataclass(frozen=True, slots=True, eq=False)
class StreamsLayer(DecoderLayer):
    """A layer of Gemma 3n, which has several residuals and a learned residual beside attention."""

    altup: AltUpLayer

    def __call__(self, residual: Residual, step: DecoderStep, adapters: LayerAdapters) -> None:
        assert residual.streams is not None
        assert self.layer_input is not None
        kernels = adapters.kernels
        streams = residual.streams = self.altup.predict(residual.streams, kernels)
        # Only the first stream goes through the blocks. The others are corrected by its change.
        total = streams[0].clone()
        x = self.attention.norm(total, adapters)
        total.add_(self.attention(x, step, adapters)).add_(self.altup.laurel(x, kernels)).mul_(0.5**0.5)
        x = self.feed_forward.norm(total, adapters)
        total.add_(self.feed_forward(x, total, step, adapters))
        streams = residual.streams = self.altup.correct(streams, total, kernels)
        streams[1:] += self.layer_input(self.altup.gate_input(streams[0]), step, adapters)
