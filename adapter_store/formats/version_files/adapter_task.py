"""What an adapter was trained for, other than generation: classes of texts, or embeddings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from loramux.adapter_store.errors import printable

Activation = Literal["softmax", "sigmoid", "identity"]

MAX_LABELS = 1024
"""Maximum number of classes."""

MAX_LABEL_CHARS = 128

ACTIVATIONS: Mapping[str, Activation] = {
    "single_label_classification": "softmax",
    "multi_label_classification": "sigmoid",
    "regression": "identity",
}
"""The activations of transformers' problem types, as in vLLM."""


@dataclass(frozen=True, slots=True)
class AdapterTask:
    """A classifier has a head with a row for each of `labels`. `activation` makes probabilities of its logits."""

    kind: Literal["classification", "embedding"]
    labels: tuple[str, ...] = ()
    activation: Activation = "softmax"

    def document(self) -> dict[str, Any]:
        """Return JSON values, to store with the version."""
        return {"kind": self.kind} if self.kind == "embedding" else {**asdict(self), "labels": list(self.labels)}

    @staticmethod
    def from_document(document: Mapping[str, Any] | None) -> AdapterTask | None:
        if document is None:
            return None
        return AdapterTask(document["kind"], tuple(document.get("labels", ())), document.get("activation", "softmax"))


EMBEDDING_TASK = AdapterTask("embedding")


def classification_task(
    num_labels: int, names: Sequence[str] | None = None, problem_type: str | None = None
) -> AdapterTask:
    """Return the task of a classifier. Labels without names are called `LABEL_0` and so on, as in transformers.

    Without a problem type, one label has a sigmoid, and several have a softmax, as in vLLM.
    """
    labels = tuple(names) if names is not None else tuple(f"LABEL_{index}" for index in range(num_labels))
    default: Activation = "sigmoid" if num_labels == 1 else "softmax"
    return AdapterTask("classification", labels, default if problem_type is None else ACTIVATIONS[problem_type])


def task_problem(task: AdapterTask) -> str | None:
    """Return what is wrong with a task that comes from a process that is not trusted, or None."""
    if task.kind == "embedding":
        return "an embedding has labels" if task.labels else None
    if not 1 <= len(task.labels) <= MAX_LABELS:
        return "a classifier has too few or too many labels"
    if not all(label and printable(label, MAX_LABEL_CHARS) == label for label in task.labels):
        return "a label is not printable"
    return None
