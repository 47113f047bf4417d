"""Limits each row of the logits to its tokens: the base's, or another number if its adapter resized the vocabulary."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from loramux.engine.device.accelerator import Accelerator
from loramux.kernels.layout import MAX_EXTRA_TOKENS

FORBIDDEN = -1e30
"""Logit for forbidden tokens: low enough for a weight of 0, but finite, because non-finite rows end their sequences."""


@dataclass(frozen=True, slots=True, eq=False)
class Vocabularies:
    """`sizes` int32 `[num_rows]`, on the device, is the number of tokens of each row; none is below `smallest`."""

    sizes: torch.Tensor
    smallest: int
    is_wider: bool
    """True if a row has more tokens than the base."""

    @staticmethod
    def of(sizes: npt.NDArray[np.int32] | None, base_size: int, accelerator: Accelerator) -> Vocabularies | None:
        """The vocabularies of rows with these numbers of tokens, or None if all rows have the base's tokens."""
        if sizes is None:
            return None
        on_device = accelerator.stage(torch.from_numpy(sizes))
        return Vocabularies(on_device, min(base_size, int(sizes.min())), int(sizes.max()) > base_size)

    def widened(self, logits: torch.Tensor) -> torch.Tensor:
        """Copy logits of the base's tokens `[num_rows, vocab_size]` if they need columns for further tokens.

        The number of columns is always the same, because a GPU's kernels are compiled for it.
        """
        if not self.is_wider:
            return logits
        num_rows, vocab_size = logits.shape
        wide = logits.new_empty(num_rows, vocab_size + MAX_EXTRA_TOKENS)
        wide[:, :vocab_size] = logits
        return wide

    def forbid_others(self, logits: torch.Tensor) -> None:
        """Forbid tokens that a row does not have. Their logits are arbitrary."""
        columns = torch.arange(self.smallest, logits.shape[1], dtype=torch.int32, device=logits.device)
        logits[:, self.smallest :].masked_fill_(columns >= self.sizes[:, None], FORBIDDEN)
