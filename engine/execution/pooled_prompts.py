"""Pools prompts: adds up the hidden states of each prompt's rows in a step."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from loramux.engine.device.accelerator import Accelerator
from loramux.engine.sequences.batch import PooledRows


@dataclass(frozen=True, slots=True, eq=False)
class PooledPrompts:
    """The sums of a step's pooled rows, float64 `[num_sequences, hidden_size]`, on their way to the host."""

    sums: torch.Tensor

    def by_sequence(self) -> list[npt.NDArray[np.float64]]:
        """The sums for each entry of `Batch.pooled`."""
        return list(self.sums.numpy())


@torch.inference_mode()
def pool_prompts(pooled: tuple[PooledRows, ...], hidden: torch.Tensor, accelerator: Accelerator) -> PooledPrompts:
    """Add up `hidden` `[num_pooled_rows, hidden_size]`, which holds the rows of all entries of `pooled` in order.

    The sums do not depend on how a prompt is divided into steps, except for rounding in float64. A value that is not
    finite affects only its own sequence.
    """
    counts = torch.tensor([one.num_rows for one in pooled])
    owners = accelerator.stage(torch.repeat_interleave(counts))
    sums = torch.zeros(len(pooled), hidden.shape[1], dtype=torch.float64, device=hidden.device)
    sums.index_add_(0, owners, hidden.double())
    return PooledPrompts(accelerator.download(sums))
