"""Makes probabilities of the logits of classes."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from loramux.adapter_store.formats.version_files.adapter_task import Activation


def class_probabilities(pooled: bytes, activation: Activation) -> npt.NDArray[np.float64]:
    """Return the probabilities of classes, float64 `[num_labels]`. `pooled` is `SequenceOutput.pooled`.

    `softmax` divides by the sum over all classes, `sigmoid` treats each class by itself, and `identity` returns the
    logits.
    """
    logits = np.frombuffer(pooled, "<f4").astype(np.float64)
    if activation == "identity":
        return logits
    # The exponents are never positive, so nothing overflows.
    probabilities: npt.NDArray[np.float64]
    if activation == "sigmoid":
        small = np.exp(-np.abs(logits))
        probabilities = np.where(logits >= 0, 1.0, small) / (1.0 + small)
    else:
        weights = np.exp(logits - logits.max())
        probabilities = weights / weights.sum()
    return probabilities
