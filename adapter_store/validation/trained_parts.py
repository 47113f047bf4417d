"""The weights of the embedding and head that an adapter's files contain, and the rows of the base that they replace.

For each module, PEFT starts with the base's weight. Each of the following then replaces all or part of it, in this
order: a copy of the base's weight in the file; the module's own weight, if the module is in `modules_to_save`; the rows
of `trainable_token_indices`. A LoRA of the module is added to the result. If the base ties its head to its embedding, a
copy of the base's weight overwrites both, and the head also uses the embedding's trained rows.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from loramux.adapter_store.errors import AdapterRejected
from loramux.adapter_store.formats.files.float_formats import to_float32
from loramux.adapter_store.formats.files.safetensors_header import TensorEntry
from loramux.adapter_store.formats.files.tensor_file import TensorFile
from loramux.adapter_store.formats.packed.module_places import TENSOR_PREFIX
from loramux.adapter_store.formats.packed.pack_target import PackTarget
from loramux.adapter_store.formats.packed.trained_rows import (
    BASE_SUFFIXES,
    DELTA_SUFFIX,
    UNUSED_SUFFIXES,
    WEIGHT_SUFFIX,
    TrainedRows,
)
from loramux.adapter_store.formats.version_files.adapter_task import AdapterTask
from loramux.adapter_store.validation.class_head import find_class_head
from loramux.adapter_store.validation.peft_config import PeftConfig
from loramux.adapter_store.validation.trained_config import EMBEDDING, HEAD
from loramux.adapter_store.validation.vocab_size import ResizedVocabulary, resized_vocabulary
from loramux.adapter_store.validation.weight_checks import check_values
from loramux.kernels.layout import trained_rows_of

_ADAPTED_SUFFIX, _TOKENS_SUFFIX = BASE_SUFFIXES[1:]


@dataclass(slots=True)
class TrainedParts:
    """The replaced rows by module, the shapes of their tensors, and pairs of tensors that must be equal."""

    rows: dict[str, TrainedRows] = field(default_factory=dict)
    shapes: dict[str, tuple[int, int]] = field(default_factory=dict)
    twins: list[tuple[str, str]] = field(default_factory=list)
    base_copies: list[str] = field(default_factory=list)
    """Current names of the tensors in which PEFT saved copies of the base's weights."""
    vocabulary: ResizedVocabulary | None = None
    task: AdapterTask | None = None
    """The task of a classifier, whose head is among `rows` as `lm_head`. None if the file has no such head."""

    @property
    def vocab_size(self) -> int | None:
        """The adapter's vocabulary size, or None if the adapter has the base's vocabulary."""
        return None if self.vocabulary is None else self.vocabulary.num_tokens

    def check_shapes(self, entries: Mapping[str, TensorEntry]) -> None:
        """Raise AdapterRejected if a tensor has the wrong shape. `entries` are keyed by current names."""
        for name, wanted in self.shapes.items():
            entry = entries[name]
            if entry.shape == wanted:
                continue
            if name.endswith(DELTA_SUFFIX) and entry.shape[1:] == wanted[1:]:
                raise AdapterRejected(
                    "token_mismatch",
                    f"the tensor has {entry.shape[0]} rows, but the configuration lists {wanted[0]} tokens",
                    entry.name,
                )
            raise AdapterRejected(
                "base_mismatch",
                f"the tensor has shape {list(entry.shape)}, but the base needs {list(wanted)}",
                entry.name,
            )

    def check_values(self, file: TensorFile, entries: Mapping[str, TensorEntry]) -> None:
        """Raise AdapterRejected for values that cannot be served, and for tied weights that differ."""
        used = {name for rows in self.rows.values() for name in (rows.whole, rows.delta) if name is not None}
        for name in sorted(used):
            original = entries[name]
            for block in file.blocks(original.name):
                check_values(original.name, to_float32(file.raw_rows(original.name, block), original.dtype))
        for first, second in self.twins:
            one, other = entries[first], entries[second]
            for block in file.blocks(one.name):
                values = [to_float32(file.raw_rows(each.name, block), each.dtype) for each in (one, other)]
                if not np.array_equal(values[0], values[1]):
                    raise AdapterRejected(
                        "base_mismatch",
                        "the base ties its head to its embedding, but the file has different weights for the two",
                        other.name,
                    )


def trained_parts(
    config: PeftConfig, target: PackTarget, entries: Mapping[str, TensorEntry], adapted: Collection[str]
) -> TrainedParts:
    """Find the trained parts of a file. Raises AdapterRejected if PEFT would not load them.

    `entries` are the file's tensors by current names, and `adapted` contains the keys of the modules with a LoRA.
    """
    saved, tokens = set(config.modules_to_save), dict(config.token_indices)
    modules = {module.name: trained_rows_of(module) for module in target.outer_modules}
    for key in (*saved, *tokens):
        if key not in modules:
            raise AdapterRejected("unknown_module", "adapters cannot replace this module of the base", key)
    parts = TrainedParts(vocabulary=resized_vocabulary(config, target, entries))
    if parts.vocab_size is not None:
        modules = {key: (parts.vocab_size, row_len) for key, (_, row_len) in modules.items()}
    _check_tokens(config, {key: count for key, (count, _) in modules.items()}, adapted, target)
    is_tied = target.tied_embeddings and modules.keys() == {EMBEDDING, HEAD}
    follows_whole = is_tied and config.ensure_weight_tying and bool(saved)
    follows_tokens = is_tied and EMBEDDING in tokens and tokens.get(HEAD, tokens[EMBEDDING]) == tokens[EMBEDDING]
    if is_tied:
        _check_tying(config, follows_tokens, adapted)
    if follows_whole:
        saved = {EMBEDDING}

    def named(key: str, suffix: str, shape: tuple[int, int]) -> str:
        parts.shapes[TENSOR_PREFIX + key + suffix] = shape
        return TENSOR_PREFIX + key + suffix

    def is_there(key: str, suffix: str) -> bool:
        return TENSOR_PREFIX + key + suffix in entries

    copies: dict[str, str] = {}
    for key, shape in modules.items():
        if key in saved:
            # PEFT saves these tensors too, but does not use them. They must have the right shape and are then ignored.
            for suffix in filter(partial(is_there, key), UNUSED_SUFFIXES):
                named(key, suffix, shape)
            continue
        has_tokens = key in tokens or (key == HEAD and follows_tokens)
        suffix = _ADAPTED_SUFFIX if key in adapted else _TOKENS_SUFFIX if has_tokens else WEIGHT_SUFFIX
        if is_there(key, suffix):
            copies[key] = named(key, suffix, shape)
    if is_tied and len(copies) == 2:
        parts.twins.append((copies[EMBEDDING], copies[HEAD]))
    parts.base_copies = sorted(copies.values())
    for key, shape in modules.items():
        # With a tied base, PEFT's copy overwrites both modules' weights, whichever of the two it was saved for.
        whole = copies.get(EMBEDDING, copies.get(HEAD)) if is_tied else copies.get(key)
        delta = None
        if key in saved:
            whole = named(key, WEIGHT_SUFFIX, shape)
        if key in tokens and not (key == HEAD and follows_tokens):
            delta = named(key, DELTA_SUFFIX, (len(tokens[key]), shape[1]))
        if whole is not None or delta is not None:
            parts.rows[key] = TrainedRows(whole, delta, tokens[key] if delta is not None else ())
    if follows_whole:
        parts.rows[HEAD] = parts.rows[EMBEDDING]
        if HEAD in copies:
            parts.twins.append((TENSOR_PREFIX + EMBEDDING + WEIGHT_SUFFIX, copies[HEAD]))
            parts.base_copies = []
    if follows_tokens:
        parts.rows[HEAD] = parts.rows[EMBEDDING]
        if is_there(HEAD, DELTA_SUFFIX):
            twin = named(HEAD, DELTA_SUFFIX, (len(tokens[EMBEDDING]), modules[HEAD][1]))
            parts.twins.append((TENSOR_PREFIX + EMBEDDING + DELTA_SUFFIX, twin))
    if config.has_class_head:
        others = frozenset((*config.modules_to_save, *tokens, *adapted))
        head = find_class_head(config.labels, target, entries, others, parts.vocab_size)
        parts.shapes.update(head.shapes)
        parts.rows[HEAD], parts.task = head.rows, head.task
    return parts


def _check_tokens(
    config: PeftConfig, vocab_sizes: Mapping[str, int], adapted: Collection[str], target: PackTarget
) -> None:
    biased = {module.name for module in target.outer_modules if module.has_bias}
    for key, tokens in config.token_indices:
        if key in biased or (biased and target.tied_embeddings):
            raise AdapterRejected(
                "unsupported_config",
                "PEFT leaves out the bias of the base's head if tokens of the head were trained",
                "trainable_token_indices",
            )
        if key in config.modules_to_save:
            raise AdapterRejected(
                "invalid_config",
                "a module in modules_to_save also has trained tokens",
                "trainable_token_indices",
            )
        if key in adapted:
            raise AdapterRejected(
                "unsupported_config", "PEFT cannot train tokens of a module that has a LoRA", "trainable_token_indices"
            )
        if max(tokens) >= vocab_sizes[key]:
            raise AdapterRejected(
                "base_mismatch",
                f"the vocabulary has {vocab_sizes[key]} tokens, numbered from 0",
                "trainable_token_indices",
            )


def _check_tying(config: PeftConfig, follows_tokens: bool, adapted: Collection[str]) -> None:
    """For a base that ties its head to its embedding, refuse parts that PEFT does not load or ties differently."""
    if follows_tokens and HEAD in config.modules_to_save:
        raise AdapterRejected(
            "invalid_config",
            "the base ties its head to its embedding, so the embedding's trained tokens cannot be combined with a "
            "separate head",
            "modules_to_save",
        )
    if follows_tokens and config.use_dora and HEAD in adapted:
        raise AdapterRejected(
            "unsupported_config", "PEFT cannot combine DoRA of a tied head with trained tokens", "use_dora"
        )
    if config.ensure_weight_tying:
        has_lora = not {EMBEDDING, HEAD}.isdisjoint(adapted)
        num_kinds = has_lora + bool(config.modules_to_save) + bool(config.token_indices)
        has_two_lists = len(config.token_indices) == 2 and not follows_tokens
        if num_kinds > 1 or has_two_lists:
            raise AdapterRejected(
                "unsupported_config",
                "with a tied base, ensure_weight_tying is supported for a LoRA of the embedding and the head, for "
                "modules_to_save, or for the same tokens of both, but not for several of these",
                "ensure_weight_tying",
            )
