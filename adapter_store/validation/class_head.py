"""The head of a classifier, which PEFT saves with an adapter whose task type is SEQ_CLS."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

from loramux.adapter_store.errors import AdapterRejected, printable
from loramux.adapter_store.formats.files.safetensors_header import TensorEntry
from loramux.adapter_store.formats.packed.class_head import CLASS_HEADS, class_head_names
from loramux.adapter_store.formats.packed.pack_target import PackTarget
from loramux.adapter_store.formats.packed.trained_rows import TrainedRows
from loramux.adapter_store.formats.version_files.adapter_task import (
    ACTIVATIONS,
    MAX_LABEL_CHARS,
    MAX_LABELS,
    AdapterTask,
    classification_task,
)
from loramux.adapter_store.validation.trained_config import EMBEDDING, HEAD

SEQUENCE_CLASSIFICATION, FEATURE_EXTRACTION = "SEQ_CLS", "FEATURE_EXTRACTION"
LABEL_KEYS = frozenset({"num_labels", "id2label", "label2id", "problem_type"})
"""Keys of transformers' model configuration that may be copied into `adapter_config.json`."""


@dataclass(frozen=True, slots=True)
class LabelConfig:
    """What a configuration says about the classes, as in transformers' `config.json`. None means nothing."""

    num_labels: int | None = None
    names: tuple[str, ...] | None = None
    problem_type: str | None = None


@dataclass(frozen=True, slots=True)
class ClassHead:
    """The trained rows of a class head, the shapes of its tensors, and the task."""

    rows: TrainedRows
    shapes: Mapping[str, tuple[int, int]]
    task: AdapterTask


def parse_labels(document: Mapping[str, Any]) -> LabelConfig:
    """Parse the keys in LABEL_KEYS. Raises AdapterRejected."""
    count, names, problem = document.get("num_labels"), document.get("id2label"), document.get("problem_type")
    if count is not None and (type(count) is not int or not 1 <= count <= MAX_LABELS):
        _refuse("invalid_config", f"num_labels must be a whole number from 1 to {MAX_LABELS}", "num_labels")
    if problem is not None and problem not in tuple(ACTIVATIONS):
        _refuse("invalid_config", f"problem_type must be one of {', '.join(ACTIVATIONS)}", "problem_type")
    listed = None
    if names is not None:
        if not isinstance(names, dict) or not 1 <= len(names) <= MAX_LABELS:
            _refuse("invalid_config", f"id2label must be an object with 1 to {MAX_LABELS} labels", "id2label")
        if set(names) != {str(index) for index in range(len(names))}:
            _refuse("invalid_config", "the keys of id2label must be the numbers of the labels, from 0", "id2label")
        listed = tuple(names[str(index)] for index in range(len(names)))
        if not all(isinstance(name, str) and name and printable(name, MAX_LABEL_CHARS) == name for name in listed):
            _refuse("invalid_config", f"a label must have 1 to {MAX_LABEL_CHARS} printable characters", "id2label")
        if count not in (None, len(listed)):
            _refuse("invalid_config", "num_labels is not the number of labels in id2label", "num_labels")
    return LabelConfig(count, listed, problem)


def find_class_head(
    labels: LabelConfig,
    target: PackTarget,
    entries: Mapping[str, TensorEntry],
    others: frozenset[str],
    vocab_size: int | None,
) -> ClassHead:
    """Find the head in a file, whose tensors are `entries` by current names. Raises AdapterRejected.

    `others` are the keys of the outer modules that the adapter changes otherwise, and `vocab_size` is the size of its
    own vocabulary, or None.
    """
    found = [head for head in CLASS_HEADS if any(name in entries for name in class_head_names(head))]
    if len(found) != 1:
        _refuse(
            "missing_tensor",
            f"a classifier has one head, {' or '.join(CLASS_HEADS)}, but the file has {len(found) or 'none'}",
            "modules_to_save",
        )
    if HEAD in others or vocab_size is not None:
        _refuse(
            "unsupported_config",
            "a classifier has no lm_head, so an adapter cannot have both, nor tokens of its own",
            "modules_to_save",
        )
    weight, bias, *unused = class_head_names(found[0])
    if bias in entries:
        _refuse("unsupported_config", "the head of a decoder's classifier has no bias", entries[bias].name)
    if weight not in entries:
        _refuse("missing_tensor", "the configuration targets this tensor, but the file lacks it", weight)
    entry, hidden_size = entries[weight], _hidden_size(target)
    most = min(MAX_LABELS, target.vocab_size or 0)
    if len(entry.shape) != 2 or entry.shape[1] != hidden_size or not 1 <= entry.shape[0] <= most:
        _refuse(
            "base_mismatch",
            f"the tensor has shape {list(entry.shape)}, but a head for this base is [labels, {hidden_size}], with up "
            f"to {most} labels",
            entry.name,
        )
    num_labels = entry.shape[0]
    for key, stated in (
        ("num_labels", labels.num_labels),
        ("id2label", None if labels.names is None else len(labels.names)),
    ):
        if stated not in (None, num_labels):
            _refuse("invalid_config", f"the head has {num_labels} labels, but {key} has {stated}", key)
    shape = (num_labels, hidden_size)
    return ClassHead(
        TrainedRows(None, weight, tuple(range(num_labels))),
        {name: shape for name in (weight, *unused) if name in entries},
        classification_task(num_labels, labels.names, labels.problem_type),
    )


def _hidden_size(target: PackTarget) -> int:
    """Return the length of the head's rows, or 0 for a target without an embedding, which fits no head."""
    return next((module.out_features for module in target.outer_modules if module.name == EMBEDDING), 0)


def _refuse(code: str, message: str, param: str) -> NoReturn:
    raise AdapterRejected(code, message, param)
