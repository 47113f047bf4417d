"""Pools prompts: adds up the hidden states of each prompt's rows in a step, or computes the logits of its classes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from loramux.engine.device.accelerator import Accelerator
from loramux.engine.sequences.batch import PooledRows

ClassLogits = Callable[[list[int]], torch.Tensor]
"""Returns the logits of the classes of some pooled rows, `[num_rows, max_labels]`. Their adapters are classifiers."""


@dataclass(frozen=True, slots=True, eq=False)
class PooledPrompts:
    """The sums of a step's pooled rows, float64 `[num_sequences, hidden_size]`, on their way to the host.

    `logits` `[num_classified, max_labels]` are those of the classifiers' rows, in the order of `pooled`. It is None if
    there are none.
    """

    pooled: tuple[PooledRows, ...]
    sums: torch.Tensor
    logits: torch.Tensor | None

    def by_sequence(self) -> list[npt.NDArray[np.float64]]:
        """The sums, or the logits, for each entry of `pooled`."""
        found: list[npt.NDArray[np.float64]] = []
        rows = iter(() if self.logits is None else self.logits.double().numpy())
        for one, total in zip(self.pooled, self.sums.numpy(), strict=True):
            if one.num_labels is None:
                found.append(total)
            else:
                found.append(next(rows)[: one.num_labels] if one.num_rows else np.zeros(one.num_labels))
        return found


@torch.inference_mode()
def pool_prompts(
    pooled: tuple[PooledRows, ...], hidden: torch.Tensor, class_logits: ClassLogits, accelerator: Accelerator
) -> PooledPrompts:
    """Add up `hidden` `[num_pooled_rows, hidden_size]`, which holds the rows of all entries of `pooled` in order.

    The sums do not depend on how a prompt is divided into steps, except for rounding in float64. A value that is not
    finite affects only its own sequence.
    """
    counts = torch.tensor([one.num_rows for one in pooled])
    owners = accelerator.stage(torch.repeat_interleave(counts))
    sums = torch.zeros(len(pooled), hidden.shape[1], dtype=torch.float64, device=hidden.device)
    sums.index_add_(0, owners, hidden.double())
    firsts = (counts.cumsum(0) - counts).tolist()
    classified = [row for one, row in zip(pooled, firsts, strict=True) if one.num_labels is not None and one.num_rows]
    logits = accelerator.download(class_logits(classified).float()) if classified else None
    return PooledPrompts(pooled, accelerator.download(sums), logits)
