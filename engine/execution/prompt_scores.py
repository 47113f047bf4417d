"""Scores prompts: the log-probability and the rank of each prompt token, and the most likely tokens in its place."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from loramux.engine.device.accelerator import Accelerator
from loramux.engine.protocol.messages import PromptLogprob
from loramux.engine.sequences.batch import ScoredRows

SCORED_AT_ONCE = 64
"""Maximum number of scored rows whose logits are in memory at once: 64 float32 rows of 150,000 tokens take 38 MB."""

LogitsOf = Callable[[int, int], torch.Tensor]
"""Returns the logits of the scored rows `[begin, end)`, as `[end - begin, vocab_size]`."""


@dataclass(frozen=True, slots=True, eq=False)
class ScoredPrompts:
    """The scores of a step's prompt rows, on their way to the host.

    The rows of all `scores` are concatenated and then split into tensors of up to SCORED_AT_ONCE rows: `logprobs`
    float32 `[num_rows]`, `ranks` int64 `[num_rows]`, `values` float32 and `ids` int64 `[num_rows, count]`. `count` is
    the largest count in `scores`.
    """

    scores: tuple[ScoredRows, ...]
    logprobs: list[torch.Tensor]
    ranks: list[torch.Tensor]
    values: list[torch.Tensor]
    ids: list[torch.Tensor]

    def by_sequence(self) -> list[tuple[PromptLogprob, ...]]:
        """The log-probabilities for each entry of `scores`. They are NaN in a row whose logits contain NaN or positive
        infinity.
        """
        columns = (self.logprobs, self.ranks, self.ids, self.values)
        rows = zip(*([row for part in parts for row in part.tolist()] for parts in columns), strict=True)
        return [
            tuple(
                PromptLogprob(token_id, logprob, rank, tuple(zip(ids[: one.count], values[: one.count], strict=True)))
                for token_id, (logprob, rank, ids, values) in zip(one.token_ids, rows, strict=False)
            )
            for one in self.scores
        ]


@torch.inference_mode()
def score_prompts(scores: tuple[ScoredRows, ...], logits_of: LogitsOf, accelerator: Accelerator) -> ScoredPrompts:
    """Score a step's prompt rows, SCORED_AT_ONCE at a time. Log-probabilities are the model's, in float32."""
    scored = ScoredPrompts(scores, [], [], [], [])
    token_ids = torch.tensor([token_id for one in scores for token_id in one.token_ids], dtype=torch.int64)
    count = max(one.count for one in scores)
    for begin in range(0, len(token_ids), SCORED_AT_ONCE):
        wanted = accelerator.stage(token_ids[begin : begin + SCORED_AT_ONCE])[:, None]
        logits = logits_of(begin, begin + len(wanted)).float()
        logprobs = torch.log_softmax(logits, dim=1)
        of_token = logprobs.gather(1, wanted)
        best = logprobs.topk(min(count, logprobs.shape[1]), dim=1)
        scored.logprobs.append(accelerator.download(of_token[:, 0]))
        scored.ranks.append(accelerator.download((logprobs > of_token).sum(dim=1) + 1))
        scored.values.append(accelerator.download(best.values))
        scored.ids.append(accelerator.download(best.indices))
    return scored
