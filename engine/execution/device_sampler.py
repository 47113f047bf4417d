"""Samples tokens on the device, where the next step reads them without waiting for the host."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from loramux.engine.constraints.grammar import NO_MASKS, Masks
from loramux.engine.constraints.logit_penalties import LogitPenalties, kept_finite, penalised
from loramux.engine.decoder.vocabularies import FORBIDDEN
from loramux.engine.device.accelerator import Accelerator, Fence
from loramux.engine.device.backend import SampleTokens
from loramux.engine.device.worker_group import WorkerGroup
from loramux.engine.execution.head_drafts import SubmittedHead
from loramux.engine.execution.pooled_prompts import PooledPrompts
from loramux.engine.execution.prompt_scores import ScoredPrompts
from loramux.engine.execution.sampler import HeadDrafts, SampledToken
from loramux.engine.execution.step_buffer import SamplingInputs
from loramux.engine.execution.token_marks import DeviceTokenMarks
from loramux.engine.protocol.messages import PromptLogprob, TokenLogprobs
from loramux.engine.sequences.batch import SamplingRow

EDITED_AT_ONCE = 16
"""Maximum number of rows with a bias or penalties to edit at a time. It bounds the memory for their float32 copies."""


@dataclass(frozen=True, slots=True, eq=False)
class DownloadedLogprobs:
    """Requested log-probabilities on their way to the host.

    `rows` are indices of the step's samples. `chosen` is float32 `[num_rows]`. `values` float32 and `ids` int64
    `[num_rows, max(counts)]` describe the most likely tokens. Only the first `counts[i]` of row `i` were requested.
    `named` float32 `[num_rows, longest]` describes the tokens in `asked[i]`, which row `i` lists instead if there are
    any. It is None if no row does.
    """

    rows: list[int]
    counts: list[int]
    chosen: torch.Tensor
    values: torch.Tensor
    ids: torch.Tensor
    asked: list[tuple[int, ...]]
    named: torch.Tensor | None

    def by_row(self, token_ids: list[int]) -> dict[int, TokenLogprobs]:
        found: dict[int, TokenLogprobs] = {}
        chosen, values, ids = self.chosen.tolist(), self.values.tolist(), self.ids.tolist()
        named = [()] * len(self.rows) if self.named is None else self.named.tolist()
        for place, (row, count, asked) in enumerate(zip(self.rows, self.counts, self.asked, strict=True)):
            token_id = token_ids[row]
            if asked:
                ranked = {token_id: chosen[place]} | dict(zip(asked, named[place], strict=False))
                top = tuple(ranked.items())
            else:
                top = tuple(zip(ids[place][:count], values[place][:count], strict=True))
            found[row] = TokenLogprobs(token_id, chosen[place], top)
        return found


@dataclass(frozen=True, slots=True, eq=False)
class SampledStep:
    """The tokens of a submitted step, on their way to the host."""

    chosen: torch.Tensor
    logprobs: DownloadedLogprobs | None
    fence: Fence
    scored: ScoredPrompts | None = None
    pools: PooledPrompts | None = None
    head: SubmittedHead | None = None

    def tokens(self) -> list[SampledToken]:
        self.fence.wait()
        token_ids = self.chosen.tolist()
        logprobs = {} if self.logprobs is None else self.logprobs.by_row(token_ids)
        return [
            SampledToken(None) if token_id < 0 else SampledToken(token_id, logprobs.get(row))
            for row, token_id in enumerate(token_ids)
        ]

    def prompt_logprobs(self) -> list[tuple[PromptLogprob, ...]]:
        return [] if self.scored is None else self.scored.by_sequence()

    def pooled(self) -> list[npt.NDArray[np.float64]]:
        return [] if self.pools is None else self.pools.by_sequence()

    def head_drafts(self) -> HeadDrafts | None:
        return None if self.head is None else self.head.drafts()

    def repeat_rows(self) -> None:
        """Hybrid decoders have no drafts on a GPU."""


class DeviceSampler:
    """Samples tokens, and keeps the latest step's tokens on the device for the next step.

    If several `workers` run the steps, worker 0 samples for all of them.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        sample_tokens: SampleTokens,
        max_samples: int,
        eos_token_ids: tuple[int, ...],
        workers: WorkerGroup | None = None,
    ) -> None:
        self._accelerator = accelerator
        self._workers = workers
        self._sample_tokens = sample_tokens
        self._eos_token_ids = eos_token_ids
        self._chosen = torch.zeros(max_samples, dtype=torch.int32, device=accelerator.device)
        self._marks = DeviceTokenMarks(accelerator)

    def chosen(self, num_samples: int) -> torch.Tensor:
        """The tokens of the latest step on the device, int32 `[num_samples]`, or -1 where it chose none."""
        return self._chosen[:num_samples]

    def share(self, num_samples: int) -> None:
        """Give all workers the tokens of the latest step, which worker 0 has chosen."""
        if self._workers is not None:
            self._workers.broadcast(self.chosen(num_samples))

    def resolve(self, tokens: torch.Tensor) -> torch.Tensor:
        """Replace negative entries with the tokens that the previous step chose. See `Batch.tokens`.

        If the previous step chose no token for a row, because its logits were not finite, the row gets token 0. The
        host will end that row's sequence and discard its result from this step.
        """
        chosen = self._chosen[(-1 - tokens).clamp(min=0)]
        return torch.where(tokens < 0, chosen, tokens).clamp(min=0)

    @torch.inference_mode()
    def choose(
        self,
        logits: torch.Tensor,
        samples: Sequence[SamplingRow],
        inputs: SamplingInputs,
        masks: Masks = NO_MASKS,
    ) -> SampledStep:
        """Choose one token per row of `logits` `[num_samples, vocab_size]`, overwriting `logits`.

        Log-probabilities are the model's, before bias, penalties, temperature and truncation, as in the OpenAI API.
        """
        count = len(samples)
        chosen = self._chosen[:count]
        raw = self._logprobs(logits, samples)
        self._forbid_the_end(logits, samples)
        self._forbid_by(masks, logits)
        self._sample_tokens(
            logits,
            inputs.temperature[:count],
            inputs.top_k[:count],
            inputs.top_p[:count],
            inputs.min_p[:count],
            inputs.uniform[:count],
            chosen,
            all_greedy=all(one.params.temperature == 0 for one in samples),
        )
        self._choose_edited(logits, samples, inputs, chosen)
        logprobs = None if raw is None else self._download(raw, chosen, samples)
        return SampledStep(self._accelerator.download(chosen), logprobs, self._accelerator.fence())

    def _choose_edited(
        self, logits: torch.Tensor, samples: Sequence[SamplingRow], inputs: SamplingInputs, chosen: torch.Tensor
    ) -> None:
        """Choose again for rows with a bias or penalties, using float32 copies. Other rows are unaffected.

        In the dtype of the logits, a small penalty on a large logit would be lost to rounding.
        """
        self._marks.hold(samples, logits.shape[1])
        for has_penalties in (False, True):
            edited = [
                (row, one.logit_penalties)
                for row, one in enumerate(samples)
                if one.logit_penalties is not None and one.logit_penalties.has_penalties == has_penalties
            ]
            for start in range(0, len(edited), EDITED_AT_ONCE):
                rows, penalties = zip(*edited[start : start + EDITED_AT_ONCE], strict=True)
                self._choose_rows(logits, rows, penalties, inputs, chosen)

    def _choose_rows(
        self,
        logits: torch.Tensor,
        rows: Sequence[int],
        penalties: Sequence[LogitPenalties],
        inputs: SamplingInputs,
        chosen: torch.Tensor,
    ) -> None:
        """Choose again for these rows. Either all of them or none must have penalties."""
        stage = self._accelerator.stage
        places = stage(torch.tensor(rows))
        model = logits[places].float()
        changed = self._biased(model, penalties)
        slots = None
        if penalties[0].has_penalties:
            slots = self._marks.slots(penalties)
            factors = stage(torch.stack([one.penalties for one in penalties], dim=1))
            changed = penalised(changed, self._marks.rows(slots, model.shape[1]), *factors)
        token_ids = torch.empty(len(rows), dtype=torch.int32, device=logits.device)
        self._sample_tokens(
            kept_finite(changed, model),
            inputs.temperature[places],
            inputs.top_k[places],
            inputs.top_p[places],
            inputs.min_p[places],
            inputs.uniform[places],
            token_ids,
        )
        chosen[places] = token_ids
        if slots is not None:
            self._marks.mark(penalties, slots, token_ids)

    def _biased(self, logits: torch.Tensor, penalties: Sequence[LogitPenalties]) -> torch.Tensor:
        """The logits with each row's bias added, float32 `[num_rows, vocab_size]`."""
        counts = torch.tensor([len(one.bias) for one in penalties])
        if not counts.any():
            return logits
        stage = self._accelerator.stage
        biased = stage(torch.repeat_interleave(counts)), stage(torch.cat([one.bias_ids for one in penalties]))
        changed = logits.clone()
        changed[biased] = logits[biased] + stage(torch.cat([one.bias for one in penalties]))
        return changed

    def _logprobs(self, logits: torch.Tensor, samples: Sequence[SamplingRow]) -> torch.Tensor | None:
        """Log-probabilities for rows that requested them, float32 `[num_rows, vocab_size]`, or None if no row did."""
        rows = [logits[row] for row, one in enumerate(samples) if one.params.num_logprobs is not None]
        return torch.log_softmax(torch.stack(rows).float(), dim=1) if rows else None

    def _download(
        self, logprobs: torch.Tensor, chosen: torch.Tensor, samples: Sequence[SamplingRow]
    ) -> DownloadedLogprobs:
        rows = [row for row, one in enumerate(samples) if one.params.num_logprobs is not None]
        counts = [min(samples[row].params.num_logprobs or 0, logprobs.shape[1]) for row in rows]
        asked = [samples[row].params.logprob_token_ids for row in rows]
        ids = torch.stack([chosen[row] for row in rows]).long().clamp(min=0)
        best = logprobs.topk(max(counts), dim=1)
        return DownloadedLogprobs(
            rows=rows,
            counts=counts,
            chosen=self._accelerator.download(logprobs.gather(1, ids[:, None])[:, 0]),
            values=self._accelerator.download(best.values),
            ids=self._accelerator.download(best.indices),
            asked=asked,
            named=self._named(logprobs, asked) if any(asked) else None,
        )

    def _named(self, logprobs: torch.Tensor, asked: list[tuple[int, ...]]) -> torch.Tensor:
        """The log-probabilities of the tokens in `asked`, float32 `[num_rows, longest]`. Token 0 pads short rows."""
        longest = max(map(len, asked))
        ids = self._accelerator.stage(torch.tensor([(*one, *[0] * (longest - len(one))) for one in asked]))
        return self._accelerator.download(logprobs.gather(1, ids))

    def _forbid_the_end(self, logits: torch.Tensor, samples: Sequence[SamplingRow]) -> None:
        """Forbid the tokens that would end a sequence before its `min_tokens`."""
        places = [(row, token_id) for row, one in enumerate(samples) for token_id in one.forbidden(self._eos_token_ids)]
        if not places:
            return
        rows, token_ids = self._accelerator.stage(torch.tensor(places)).unbind(1)
        values = logits[rows, token_ids]
        # Keep non-finite values, so that the row is still detected as non-finite.
        logits[rows, token_ids] = torch.where(torch.isfinite(values), FORBIDDEN, values)

    def _forbid_by(self, masks: Masks, logits: torch.Tensor) -> None:
        """Forbid tokens that the masks do not allow. Biases and penalties, added later, are too small to undo this."""
        if not masks:
            return
        stage = self._accelerator.stage
        places = stage(torch.tensor(list(masks)))
        # A sequence's mask ends with its vocabulary. Tokens beyond it are not allowed.
        packed = np.zeros((len(masks), -(-logits.shape[1] // 8)), np.uint8)
        for row, mask in zip(packed, masks.values(), strict=True):
            num_bytes = min(len(mask), len(row))
            row[:num_bytes] = mask[:num_bytes]
        bits = stage(torch.from_numpy(packed))
        shifts = torch.arange(8, dtype=torch.uint8, device=bits.device)
        is_allowed = ((bits[:, :, None] >> shifts) & 1).flatten(1)[:, : logits.shape[1]].bool()
        values = logits[places]
        # Keep non-finite values here too.
        logits[places] = torch.where(is_allowed | ~torch.isfinite(values), values, FORBIDDEN)
