"""The names of the head of a classifier.

A class head `[num_labels, hidden_size]` is packed like trained rows of `lm_head`: label `i` has the row of token `i`.
A classifier has no `lm_head` of its own.
"""

from __future__ import annotations

from loramux.adapter_store.formats.packed.module_places import TENSOR_PREFIX
from loramux.adapter_store.formats.packed.trained_rows import UNUSED_SUFFIXES, WEIGHT_SUFFIX

CLASS_HEADS = ("score", "classifier")
"""The names that transformers' models for sequence classification give their heads."""


def class_head_names(head: str) -> tuple[str, ...]:
    """Return the names that PEFT can give a head's weight and bias, and the copies of the weight that it saves but does
    not use.
    """
    return tuple(TENSOR_PREFIX + head + suffix for suffix in (WEIGHT_SUFFIX, ".bias", *UNUSED_SUFFIXES))
