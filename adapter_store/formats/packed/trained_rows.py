"""The rows of the base's embedding and head that an adapter replaces, rather than modifies with a LoRA."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from loramux.adapter_store.formats.packed.module_places import TENSOR_PREFIX
from loramux.adapter_store.formats.packed.pack_target import PackTarget
from loramux.kernels.layout import NO_ROWS, LinearShape, RowCounts, trained_rows_of

WEIGHT_SUFFIX = ".weight"
"""Suffix of a module's own trained weight `[vocab_size, hidden_size]`, or of a copy of the base's weight."""
BASE_SUFFIXES = (WEIGHT_SUFFIX, ".base_layer.weight", ".token_adapter.base_layer.weight")
"""Suffixes of a copy of the base's weight in a PEFT file.

PEFT overwrites the base's weight with the copy when it loads the adapter.
"""
UNUSED_SUFFIXES = (".original_module.weight", ".modules_to_save.weight")
"""Suffixes of other copies that PEFT saves for a module in `modules_to_save` but does not use with the adapter."""
DELTA_SUFFIX = ".token_adapter.trainable_tokens_delta"
"""Suffix of the tensor `[len(ids), hidden_size]` that contains the rows trained with `trainable_token_indices`."""


def outer_weight_names(key: str) -> tuple[str, ...]:
    """Return all names that PEFT can give a tensor that contains an outer module's weight or some of its rows."""
    return tuple(TENSOR_PREFIX + key + suffix for suffix in (*BASE_SUFFIXES, *UNUSED_SUFFIXES, DELTA_SUFFIX))


@dataclass(frozen=True, slots=True)
class TrainedRows:
    """The rows of one outer module's weight that an adapter replaces.

    `whole` names the tensor `[vocab_size, hidden_size]` that replaces all of them. `delta` names the tensor whose row
    `i` replaces the row of token `ids[i]`, and takes precedence over `whole`. At least one of the two is set.
    """

    whole: str | None = None
    delta: str | None = None
    ids: tuple[int, ...] = ()

    def document(self) -> dict[str, Any]:
        return {"whole": self.whole, "delta": self.delta, "ids": list(self.ids)}

    @classmethod
    def from_document(cls, document: Mapping[str, Any]) -> TrainedRows:
        return cls(document["whole"], document["delta"], tuple(int(token) for token in document["ids"]))

    def has_all(self, tokens: range) -> bool:
        return self.whole is not None or set(tokens).issubset(self.ids)

    def max_count(self, tokens: range) -> int:
        """Return how many rows of `tokens` are replaced, assuming that no row of a whole weight equals the base's."""
        return len(tokens) if self.whole is not None else sum(token in tokens for token in self.ids)


def tokens_of(module: LinearShape, vocab_size: int | None = None) -> range:
    """Return the tokens that have a row in an outer module.

    `vocab_size` is an adapter's vocabulary size, or None if it has the base's vocabulary.
    """
    return range(trained_rows_of(module)[0] if vocab_size is None else vocab_size)


def max_row_counts(trained: Mapping[str, TrainedRows], target: PackTarget, vocab_size: int | None = None) -> RowCounts:
    """Return an upper bound on the number of rows that an adapter replaces in each outer module.

    If the base ties its embeddings and the adapter's rows for both modules are equal, they are stored once.

    `vocab_size` is the adapter's vocabulary size, or None if it has the base's vocabulary.
    """
    if not trained:
        return NO_ROWS
    found = [trained.get(module.name) for module in target.outer_modules]
    counts = tuple(
        0 if rows is None else rows.max_count(tokens_of(module, vocab_size))
        for rows, module in zip(found, target.outer_modules, strict=True)
    )
    is_shared = target.tied_embeddings and len(found) > 1 and all(rows == found[0] for rows in found)
    return RowCounts(counts, is_shared, vocab_size)
