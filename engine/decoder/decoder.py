"""The decoder: one transformer for all architectures, with all of a batch's adapters applied in one pass."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
from torch.nn import functional

from loramux.engine.architectures.feed_forward_config import GELU_TANH
from loramux.engine.architectures.model_config import EMBEDDING, HEAD, ModelConfig
from loramux.engine.architectures.weight_files import HEAD_BIAS
from loramux.engine.decoder.altup import AltUp
from loramux.engine.decoder.attention import Attention
from loramux.engine.decoder.decoder_step import DecoderStep
from loramux.engine.decoder.delta_net import DeltaNet
from loramux.engine.decoder.kv_layout import kv_layout
from loramux.engine.decoder.layer_adapters import LayerAdapters
from loramux.engine.decoder.layer_inputs import LayerInputs
from loramux.engine.decoder.layer_loading import LayerLoader, all_module_groups, module_group, norm_groups
from loramux.engine.decoder.layers import Residual
from loramux.engine.decoder.mixture import Mixture
from loramux.engine.decoder.norms import AdaptableNorm
from loramux.engine.decoder.placement import Placement
from loramux.engine.decoder.rotary import growing_scales, query_scales, rotary_tables
from loramux.engine.decoder.vocabularies import Vocabularies
from loramux.engine.decoder.weights import WeightSource
from loramux.engine.device.backend import Backend
from loramux.engine.sequences.batch import StepInputs
from loramux.engine.sequences.cache_groups import narrow_windows
from loramux.engine.sequences.layer_groups import LayerGroups
from loramux.kernels.dispatch import Kernels, KernelShapes
from loramux.kernels.tables import AdapterTables, AttentionBatch, LoraCall, Segments

NoteLayer = Callable[[int], None]


def _ignore(layer: int) -> None:
    pass


@dataclass(frozen=True, slots=True, eq=False)
class HeadAdapters:
    """Inputs for the head's adapters: `segments` cover the rows of `hidden` whose adapters modify the head.

    None of these adapters replaces more than `max_rows` rows of the head. `vocabularies` is None if all of them have
    the base's vocabulary.
    """

    kernels: Kernels
    tables: AdapterTables
    segments: Segments
    max_rows: int = 0
    vocabularies: Vocabularies | None = None


class Decoder:
    """A decoder-only model on one device. Its output depends only on its inputs, the pool and the tables.

    Activations are float32 on a CPU and have the weights' dtype on a GPU. `hidden` can be captured as a CUDA graph.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: WeightSource,
        dtype: torch.dtype,
        max_len: int,
        backend: Backend,
        kv_itemsize: int | None = None,
    ) -> None:
        """`kv_itemsize` is the size of an element of K or V in bytes, by default that of `dtype`."""
        self.config = config
        self._dtype = backend.activation_dtype or dtype
        self._embedding_group, self._head_group = (
            module_group(config.outer_modules, (module,)) for module in (EMBEDDING, HEAD)
        )
        self.module_groups = tuple(np.array(group, np.intp) for group in all_module_groups(config))
        """For each group in `LayerGroups`, the indices of its modules along the module axis. A group that no layer has
        is empty.
        """
        place = Placement(weights, dtype, backend, config)
        self._embedding = place.tensor("model.embed_tokens.weight", (config.vocab_size, config.hidden_size))
        # Round the scale to the dtype of the weights before multiplying, as transformers does.
        self._embedding_scale = torch.tensor(config.embedding_scale, dtype=dtype).item()
        self._altup = None if config.altup is None else AltUp(config.altup, config.hidden_size, place)
        self._layer_inputs = LayerInputs(config, place) if config.layer_input_size else None
        attention = config.attention
        head_dims = [heads.head_dim for heads in attention.layer_heads]
        layer_ropes = list(zip(attention.ropes, head_dims, strict=True))
        ropes = list(dict.fromkeys(layer_ropes))
        # Kernels need no mask for a window that covers every context.
        windows = narrow_windows(attention.windows, max_len)
        self.cache_layout = kv_layout(config, max_len, kv_itemsize or dtype.itemsize)
        self._layers = [
            LayerLoader(config, place, layer, ropes.index(layer_ropes[layer]), windows[layer], self.cache_layout).load()
            for layer in range(config.num_layers)
        ]
        final_group = norm_groups(config, config.num_layers - 1).get(config.final_norm)
        self._final_norm = AdaptableNorm(place.norm(config.final_norm, config.hidden_size), final_group)
        self._head_is_tied = config.tied_embeddings
        if config.tied_embeddings:
            head_bias = place.tensor(HEAD_BIAS, (config.vocab_size,)) if config.head_bias else None
            self.head = backend.make_linear(self._embedding, head_bias)
        else:
            self.head = place.head(config.outer_modules[HEAD], config.head_bias)
        self._head_dims = sorted(set(head_dims))
        self._rotary = [
            (cos.to(backend.device), sin.to(backend.device))
            for cos, sin in (rotary_tables(rope, head_dim, max_len) for rope, head_dim in ropes)
        ]
        scales = query_scales(ropes[0][0], max_len)
        if attention.query_scaling is not None:
            scales = growing_scales(attention.query_scaling, max_len)
        self._query_scales = None if scales is None else scales.to(backend.device, self._dtype)

    @property
    def shapes(self) -> KernelShapes:
        """The shapes that the kernels must support."""
        mixers = [layer.attention.mixer for layer in self._layers]
        groups = [group for layer in self._layers for group in layer.groups]
        if self._layer_inputs is not None:
            groups.append(self._layer_inputs.group)
        return KernelShapes(
            groups=tuple(dict.fromkeys(groups)),
            attention=tuple(mixer.spec for mixer in mixers if isinstance(mixer, Attention)),
            outer_groups=(self._embedding_group, self._head_group),
            delta=None if self.config.delta is None else self.config.delta.spec,
        )

    @property
    def outer_factors(self) -> tuple[float, ...]:
        """Factors applied to the outputs of `config.outer_modules`, for the base and for adapters."""
        return (self._embedding_scale, 1.0)

    @property
    def embedding_bytes(self) -> int:
        """Bytes of the embeddings of which a step reads only the rows of its tokens. A tied head reads all of its
        embedding.
        """
        own = 0 if self._head_is_tied else self._embedding.nbytes
        return own + (0 if self._layer_inputs is None else self._layer_inputs.embedding_bytes)

    @property
    def expert_bytes(self) -> int:
        """Bytes of the routed experts of all layers. A step reads only the experts that its tokens choose."""
        blocks = (layer.feed_forward.inner for layer in self._layers)
        return sum(block.expert_bytes for block in blocks if isinstance(block, Mixture))

    def with_few_layers(self) -> Decoder:
        """A copy that shares the weights but has only one layer of each kind, to launch every kernel in less time."""
        few = copy.copy(self)
        few._layers = list({layer.launches: layer for layer in self._layers}.values())
        return few

    @torch.inference_mode()
    def embed(self, inputs: StepInputs, kernels: Kernels, tables: AdapterTables) -> torch.Tensor:
        """Embeddings of a step's tokens with their adapters applied, `[num_tokens, hidden_size]`."""
        tokens, segments = inputs.tokens, inputs.embedding_segments
        is_adapted = segments is not None and segments.num_segments > 0
        if is_adapted:
            # For tokens beyond the base's vocabulary, an adapter's rows replace the row that is read here.
            tokens = tokens.clamp(max=self.config.vocab_size - 1)
        embedded = functional.embedding(tokens, self._embedding)
        if segments is not None and is_adapted and tables.trained_rows is not None:
            call = LoraCall(0, self._embedding_group, tables.trained_rows, segments)
            kernels.outer.replace_rows(inputs.tokens, call, embedded)
        if self._embedding_scale != 1.0:
            embedded = embedded * self._embedding_scale
        embedded = embedded.to(self._dtype)
        if segments is not None and is_adapted:
            call = LoraCall(0, self._embedding_group, _outer(tables), segments)
            planes = kernels.outer.lora_planes(call, embedded.shape[0])
            kernels.outer.lora_gather(inputs.tokens, call, planes)
            kernels.outer.lora_expand(planes, call, embedded)
        return embedded

    @torch.inference_mode()
    def hidden(
        self, inputs: StepInputs, kernels: Kernels, tables: AdapterTables, note_layer: NoteLayer = _ignore
    ) -> torch.Tensor:
        """Run one step and return the normalised output of the last layer at the sample rows, `[num_samples,
        hidden_size]`. `note_layer` is that of `run_layers`.
        """
        residual, step = self.begin(inputs, kernels, tables)
        # Adapters replace the final norm in all rows, because their segments list the step's rows.
        replaces_norms = _replaces_norms(inputs)
        rows = slice(None) if replaces_norms else inputs.sample_rows
        hidden = self.run_layers(residual, step, inputs, rows, kernels, tables, note_layer)
        return hidden[inputs.sample_rows] if replaces_norms else hidden

    @torch.inference_mode()
    def states(
        self, inputs: StepInputs, kernels: Kernels, tables: AdapterTables, note_layer: NoteLayer = _ignore
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Run one step and return the output of the last layer of all rows, `[num_tokens, hidden_size]`, before and
        after the final norm. `note_layer` is that of `run_layers`.
        """
        residual, step = self.begin(inputs, kernels, tables)
        normed = self.run_layers(residual, step, inputs, slice(None), kernels, tables, note_layer)
        # The final norm has added the output of the last block to the residual.
        return residual.total, normed

    @torch.inference_mode()
    def advance_states(self, delta_inputs: list[torch.Tensor], batch: AttentionBatch, kernels: Kernels) -> None:
        """Apply only the delta rules to the states of `batch`. `delta_inputs` has the input of each layer with a delta
        rule, as in `StepInputs`.
        """
        mixers = [layer.attention.mixer for layer in self._layers]
        rules = [mixer for mixer in mixers if isinstance(mixer, DeltaNet)]
        for rule, projected in zip(rules, delta_inputs, strict=True):
            rule.advance(projected, batch, kernels)

    def base_embeddings(self, tokens: torch.Tensor) -> torch.Tensor:
        """Embeddings of tokens without adapters, `[num_tokens, hidden_size]`. A token beyond the base's vocabulary has
        that of the base's last token.
        """
        embedded = functional.embedding(tokens.clamp(max=self.config.vocab_size - 1), self._embedding)
        return (embedded * self._embedding_scale if self._embedding_scale != 1.0 else embedded).to(self._dtype)

    def begin(self, inputs: StepInputs, kernels: Kernels, tables: AdapterTables) -> tuple[Residual, DecoderStep]:
        """What the first layer reads."""
        residual = self._first_residual(inputs, kernels, tables)
        step = self.step(inputs, residual.total, kernels)
        if self._layer_inputs is not None:
            adapters = _layer_adapters(inputs, kernels, tables)(0)
            step = replace(step, layer_inputs=self._layer_inputs(inputs.tokens, residual.total, adapters))
        return residual, step

    def run_layers(
        self,
        residual: Residual,
        step: DecoderStep,
        inputs: StepInputs,
        rows: slice | torch.Tensor,
        kernels: Kernels,
        tables: AdapterTables,
        note_layer: NoteLayer = _ignore,
    ) -> torch.Tensor:
        """The normalised output of the last layer at `rows`. `note_layer` is called before each layer and at the end,
        before the final norm.
        """
        in_layer = _layer_adapters(inputs, kernels, tables)
        for index, layer in enumerate(self._layers):
            note_layer(index)
            layer(residual, step, in_layer(index))
        note_layer(len(self._layers))
        return self._last_residual(residual, rows).normed(self._final_norm, in_layer(self.config.num_layers - 1))

    def angles(self, positions: torch.Tensor, out: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Write the cosines and sines of each row's angles, for each rotary embedding."""
        for tables, rows in zip(self._rotary, out, strict=True):
            for table, row in zip(tables, rows, strict=True):
                torch.index_select(table, 0, positions, out=row)

    def _first_residual(self, inputs: StepInputs, kernels: Kernels, tables: AdapterTables) -> Residual:
        embedded = self.embed(inputs, kernels, tables)
        return Residual(embedded, streams=None if self._altup is None else self._altup.expand(embedded))

    def _last_residual(self, residual: Residual, rows: slice | torch.Tensor) -> Residual:
        """The residual of some rows after the last layer."""
        if self._altup is None:
            return residual.rows(rows)
        assert residual.streams is not None
        return Residual(self._altup.join(residual.streams[:, rows]))

    def step(
        self, inputs: StepInputs, embedded: torch.Tensor, kernels: Kernels, *, has_outputs: bool = True
    ) -> DecoderStep:
        """What all layers read of a step, besides its adapters and the layers' own input embeddings. A step that only
        stores K and V needs no outputs.
        """
        num_heads, num_tokens = self.config.attention.num_heads, inputs.tokens.shape[0]
        return DecoderStep(
            activate=activation_of(self.config, kernels),
            angles=[(cos[inputs.positions], sin[inputs.positions]) for cos, sin in self._rotary],
            query_scale=None if self._query_scales is None else self._query_scales[inputs.positions],
            attention=inputs.attention,
            outputs={
                head_dim: embedded.new_zeros(num_tokens, num_heads, head_dim)
                for head_dim in (self._head_dims if has_outputs else ())
            },
            states=inputs.states,
            delta_inputs=inputs.delta_inputs,
            layer_inputs=None,
        )

    @torch.inference_mode()
    def launch_norms(self, inputs: StepInputs, kernels: Kernels, tables: AdapterTables) -> None:
        """Launch the kernels with which adapters replace norms of each width, on zeros."""
        groups = (group for layer in self._layers for group in layer.norm_groups.values())
        for group in {group.total_out: group for group in groups}.values():
            y = torch.zeros(len(inputs.tokens), group.total_out, dtype=self._dtype, device=self._embedding.device)
            kernels.lora_affine(LoraCall(0, group, tables, inputs.segments), y)

    def new_hidden(self, num_rows: int) -> torch.Tensor:
        """Allocate memory for `num_rows` rows of the output of `hidden`."""
        return torch.empty(num_rows, self.config.hidden_size, dtype=self._dtype, device=self._embedding.device)

    @torch.inference_mode()
    def logits(
        self, hidden: torch.Tensor, adapters: HeadAdapters | None = None, product: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Logits of rows of `hidden`, `[num_rows, num_columns]`, in the dtype of the activations.

        `adapters` is None if no row's adapter modifies the head. There is a column for each token of the base and, if
        an adapter has further tokens, MAX_EXTRA_TOKENS more. The logits of tokens that a row's adapter lacks are
        FORBIDDEN. `product` is the head's product with `hidden` if it is already known, and is overwritten.
        """
        logits = self.head(hidden) if product is None else product
        vocabularies = None if adapters is None else adapters.vocabularies
        if vocabularies is not None:
            logits = vocabularies.widened(logits)
        if adapters is not None and adapters.segments.num_segments:
            if adapters.max_rows:
                self._replace_columns(hidden, adapters, logits)
            call = LoraCall(0, self._head_group, _outer(adapters.tables), adapters.segments)
            adapters.kernels.outer.lora_add(hidden, call, logits)
        if self.config.logit_scale != 1.0:
            logits.mul_(self.config.logit_scale)
        cap = self.config.logit_soft_cap
        if cap is not None:
            logits.div_(cap).tanh_().mul_(cap)
        if vocabularies is not None:
            vocabularies.forbid_others(logits)
        return logits

    @torch.inference_mode()
    def class_logits(self, hidden: torch.Tensor, adapters: HeadAdapters) -> torch.Tensor:
        """Logits of classes for rows of `hidden`, `[num_rows, adapters.max_rows]`, in the dtype of the activations.

        Every row's adapter is a classifier. The logits of classes that a row's adapter lacks are 0.
        """
        logits = hidden.new_zeros(hidden.shape[0], adapters.max_rows)
        self._replace_columns(hidden, adapters, logits)
        return logits

    def _replace_columns(self, hidden: torch.Tensor, adapters: HeadAdapters, logits: torch.Tensor) -> None:
        """Compute the logits of the rows that adapters replace or, in classifiers, of their classes."""
        if adapters.tables.trained_rows is None:
            return
        segments = replace(adapters.segments, max_rank=adapters.max_rows)
        call = LoraCall(0, self._head_group, adapters.tables.trained_rows, segments)
        adapters.kernels.outer.replace_columns(hidden, call, logits)


def _layer_adapters(inputs: StepInputs, kernels: Kernels, tables: AdapterTables) -> Callable[[int], LayerAdapters]:
    """Makes the adapters of a step in a layer, given the layer's index."""
    # The module groups that this step's adapters modify.
    groups = int(inputs.groups) if inputs.segments.num_segments else 0
    replaces_norms = _replaces_norms(inputs)
    return partial(
        LayerAdapters, kernels, tables, inputs.slots, inputs.segments, groups, replaces_norms, inputs.expands_first
    )


def _replaces_norms(inputs: StepInputs) -> bool:
    return inputs.segments.num_segments > 0 and bool(int(inputs.groups) & LayerGroups.NORMS)


def activation_of(config: ModelConfig, kernels: Kernels) -> Callable[[torch.Tensor], torch.Tensor]:
    clamped = config.clamped_gate
    if clamped is not None:
        return lambda x: kernels.clamped_silu_and_mul(x, clamped.alpha, clamped.limit)
    if config.feed_forward.has_gate:
        return kernels.gelu_and_mul if config.activation == GELU_TANH else kernels.silu_and_mul
    if config.activation == GELU_TANH:
        return lambda x: functional.gelu(x, approximate="tanh")
    return lambda x: functional.relu(x).square_()


def _outer(tables: AdapterTables) -> AdapterTables:
    assert tables.outer is not None, "segments of outer modules come with their tables"
    return tables.outer
