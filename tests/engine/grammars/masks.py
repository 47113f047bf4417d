from __future__ import annotations

import numpy as np

from loramux.engine.grammars.grammar import Mask


def allowed_tokens(mask: Mask) -> list[int]:
    return [int(token) for token in np.flatnonzero(np.unpackbits(mask, bitorder="little"))]
