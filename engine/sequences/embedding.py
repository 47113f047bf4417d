"""Makes an embedding of a pooled hidden state."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt


def embedding_of(pooled: bytes, dimensions: int | None, is_normalized: bool) -> npt.NDArray[np.float32]:
    """Return the first `dimensions` elements (None: all) of a pooled state, float32 `[dimensions]`.

    `pooled` is `SequenceOutput.pooled`. If `is_normalized`, the result is scaled to unit length, unless it is zero.
    """
    vector = np.frombuffer(pooled, "<f4")[:dimensions].astype(np.float64)
    length = np.linalg.norm(vector)
    if is_normalized and length > 0:
        vector = vector / length
    return vector.astype("<f4")
