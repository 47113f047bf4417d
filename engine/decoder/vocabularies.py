"""Limits each row of the logits to its vocabulary, which is the base's unless the row's adapter resized it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from loramux.engine.device.accelerator import Accelerator
from loramux.kernels.layout import MAX_EXTRA_TOKENS

FORBIDDEN = -1e30
"""Logit of forbidden tokens. Their probability is 0, but the logit is finite, because non-finite logits are an error.
"""


@dataclass(frozen=True, slots=True, eq=False)
class Vocabularies:
    """`sizes`, int32 `[num_rows]` on the device, is the vocabulary size of each row. No size is below `smallest`."""

    sizes: torch.Tensor
    smallest: int
    is_wider: bool
    """True if a row has more tokens than the base."""

    @staticmethod
    def of(sizes: npt.NDArray[np.int32] | None, base_size: int, accelerator: Accelerator) -> Vocabularies | None:
        """The vocabularies of rows with these sizes. None means that all rows have the base's vocabulary."""
        if sizes is None:
            return None
        on_device = accelerator.stage(torch.from_numpy(sizes))
        return Vocabularies(on_device, min(base_size, int(sizes.min())), int(sizes.max()) > base_size)

    def widened(self, logits: torch.Tensor) -> torch.Tensor:
        """Copy the logits `[num_rows, vocab_size]` into a wider tensor if a row has more tokens than the base.

        The copy always has MAX_EXTRA_TOKENS more columns, because GPU kernels are compiled for a fixed number of
        columns.
        """
        if not self.is_wider:
            return logits
        num_rows, vocab_size = logits.shape
        wide = logits.new_empty(num_rows, vocab_size + MAX_EXTRA_TOKENS)
        wide[:, :vocab_size] = logits
        return wide

    def forbid_others(self, logits: torch.Tensor) -> None:
        """In each row, set the logits beyond the row's vocabulary, which may be uninitialised, to FORBIDDEN."""
        columns = torch.arange(self.smallest, logits.shape[1], dtype=torch.int32, device=logits.device)
        logits[:, self.smallest :].masked_fill_(columns >= self.sizes[:, None], FORBIDDEN)
