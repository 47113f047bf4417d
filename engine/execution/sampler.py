"""Samples the next token of each row, based only on the row's own logits, settings and random stream."""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np
import numpy.typing as npt
import torch

from loramux.engine.constraints.grammar import NO_MASKS, Masks
from loramux.engine.execution.pooled_prompts import PooledPrompts
from loramux.engine.execution.prompt_scores import ScoredPrompts
from loramux.engine.protocol.messages import PromptLogprob, SamplingParams, TokenLogprobs
from loramux.engine.sequences.batch import RepeatRows, SamplingRow

NUM_LIKELIEST = 1024
"""Number of most likely tokens to find for top_k, top_p and min_p. All logits of a row are sorted only if these tokens
are not enough for it.
"""


LEAST_TEMPERATURE, MOST_TEMPERATURE = 1e-30, 1e20
"""Positive temperatures are clamped to these bounds, because float32 arithmetic would overflow or underflow beyond
them.
"""

_BITS = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little")
_BIASES = np.where(_BITS, np.float32(0.0), np.float32(-np.inf))
"""Biases (0 or -inf) of eight tokens for each value of their byte in a mask, float32 `[256, 8]`."""

_MULTIPLIERS = np.array([[0xD2511F53], [0xCD9E8D57]], np.uint64)
_KEY_STEPS = np.array([[0x9E3779B9], [0xBB67AE85]], np.uint64)
_WORD = np.uint64(0xFFFFFFFF)
_HALF = np.uint64(32)
_NUM_ROUNDS = 10


class SampledToken(msgspec.Struct, frozen=True, gc=False):
    """The token chosen for one row. `token_id` is None if the row's logits are not finite."""

    token_id: int | None
    logprobs: TokenLogprobs | None = None


@dataclass(frozen=True, slots=True)
class HeadDrafts:
    """The token that the base's own head drafts after each sampled token, or None where its logits are not finite.

    `tokens` is None if the head has only stored its K and V. Otherwise, `from_drafters` says for each token whether an
    adapter's drafter changed the head. `seconds` is the time for which the step waited for it.
    """

    tokens: list[int | None] | None
    from_drafters: list[bool]
    seconds: float


class FinishedStep(msgspec.Struct, frozen=True, eq=False, gc=False):
    """The result of a step that ran synchronously when it was submitted."""

    sampled: list[SampledToken]
    scored: ScoredPrompts | None = None
    pools: PooledPrompts | None = None
    head: HeadDrafts | None = None
    repeat: RepeatRows | None = None

    def tokens(self) -> list[SampledToken]:
        return self.sampled

    def prompt_logprobs(self) -> list[tuple[PromptLogprob, ...]]:
        return [] if self.scored is None else self.scored.by_sequence()

    def pooled(self) -> list[npt.NDArray[np.float64]]:
        return [] if self.pools is None else self.pools.by_sequence()

    def head_drafts(self) -> HeadDrafts | None:
        return self.head

    def repeat_rows(self) -> RepeatRows | None:
        return self.repeat


def sample(
    logits: torch.Tensor,
    samples: Sequence[SamplingRow],
    eos_token_ids: tuple[int, ...],
    masks: Masks = NO_MASKS,
) -> list[SampledToken]:
    """Sample one token per row of `logits`, float32 `[num_rows, vocab_size]`, with the settings in `samples`.

    As in vLLM, the bias is applied before the penalties. The mask, the temperature, and truncation by top_k, top_p and
    min_p follow. As in transformers, top_p is a share of what top_k keeps, and min_p a share of the most likely token.
    Log-probabilities are the model's before any of these changes, as in the OpenAI API.
    """
    if not samples:
        return []
    # A non-finite value makes its row's sum non-finite, and summing is far cheaper than checking each value.
    is_finite = torch.isfinite(logits.sum(dim=1)).tolist()
    if not all(is_finite):
        # The sum of finite values can overflow, so check each value.
        is_finite = torch.isfinite(logits).all(dim=1).tolist()
    # numpy compares eight values at a time. On a CPU, torch takes ten times as long.
    token_ids = torch.from_numpy(logits.numpy().argmax(axis=1))
    forced = _forced(samples, eos_token_ids, masks)
    for row, token_id in forced.items():
        token_ids[row] = token_id
    changed = _changed(logits, samples, eos_token_ids, masks, forced)
    for row, values in changed.items():
        token_ids[row] = int(values.numpy().argmax())
    random_rows = [
        row for row, one in enumerate(samples) if one.params.temperature > 0 and is_finite[row] and row not in forced
    ]
    if random_rows:
        drawn = logits[random_rows]
        for place, row in enumerate(random_rows):
            if row in changed:
                drawn[place] = changed[row]
        token_ids[random_rows] = _draw(drawn, [samples[row] for row in random_rows])
    ids = token_ids.tolist()
    for one, token_id in zip(samples, ids, strict=True):
        if one.logit_penalties is not None:
            one.logit_penalties.note(token_id, one.num_chosen)
    logprobs = _logprobs(logits, ids, samples)
    return [
        SampledToken(token_id, logprobs.get(row)) if is_finite[row] else SampledToken(None)
        for row, token_id in enumerate(ids)
    ]


def uniforms_of(samples: Sequence[SamplingRow]) -> npt.NDArray[np.float32]:
    """The random numbers in [0, 1) used to choose the tokens of `samples`."""
    return uniforms((one.seed for one in samples), (one.num_chosen for one in samples))


def _forced(samples: Sequence[SamplingRow], eos_token_ids: tuple[int, ...], masks: Masks) -> dict[int, int]:
    """The tokens of rows whose masks allow only one, by row. No other setting can change them.

    Rows with a bias or penalties are left out, because penalties count the tokens before as they are applied.
    """
    forced: dict[int, int] = {}
    for row, mask in masks.items():
        if samples[row].logit_penalties is None and np.count_nonzero(mask) == 1:
            [place] = mask.nonzero()[0].tolist()
            bits = int(mask[place])
            token_id = 8 * place + bits.bit_length() - 1
            if bits.bit_count() == 1 and token_id not in samples[row].forbidden(eos_token_ids):
                forced[row] = token_id
    return forced


def _changed(
    logits: torch.Tensor,
    samples: Sequence[SamplingRow],
    eos_token_ids: tuple[int, ...],
    masks: Masks,
    forced: Container[int],
) -> dict[int, torch.Tensor]:
    """Edited logits by row, `[vocab_size]` each, for rows whose settings change them. Other rows are not copied.

    Rows in `forced` need none, because their tokens are known.
    """
    changed: dict[int, torch.Tensor] = {}
    for row, one in enumerate(samples):
        if row in forced:
            continue
        forbidden = one.forbidden(eos_token_ids)
        mask = masks.get(row)
        if one.logit_penalties is None and not forbidden and mask is None:
            continue
        values = changed[row] = logits[row].clone()
        if one.logit_penalties is not None:
            one.logit_penalties.apply(values, one.num_chosen)
        if forbidden:
            values[list(forbidden)] = -torch.inf
        if mask is not None:
            # Adding biases takes a sixth of the time of assigning -inf through a boolean index.
            biases = torch.from_numpy(_BIASES.take(mask, axis=0).reshape(-1)[: len(values)])
            values[: len(biases)] += biases
            values[len(biases) :] = -torch.inf
    return changed


def _draw(logits: torch.Tensor, samples: Sequence[SamplingRow]) -> torch.Tensor:
    """Draw from the softmax of `logits / temperature`, restricted by top_k, top_p and min_p."""
    params = [one.params for one in samples]
    temperature = torch.tensor([used_temperature(one.temperature) for one in params], dtype=torch.float32)[:, None]
    # Subtracting the maximum first keeps division by a tiny temperature from overflowing.
    shifted = logits - logits.amax(dim=1, keepdim=True)
    uniform = torch.from_numpy(uniforms_of(samples))[:, None]
    is_cut = torch.tensor([one.top_p < 1 or one.top_k > 0 or one.min_p > 0 for one in params])
    token_ids = torch.empty(len(samples), dtype=torch.int64)
    whole, cut = (~is_cut).nonzero().squeeze(1), is_cut.nonzero().squeeze(1)
    if len(whole):
        token_ids[whole] = _pick(torch.softmax(shifted[whole] / temperature[whole], dim=1), uniform[whole])
    if len(cut):
        some = [params[row] for row in cut.tolist()]
        token_ids[cut] = _draw_cut(shifted[cut], temperature[cut], uniform[cut], some)
    return token_ids


def _draw_cut(
    shifted: torch.Tensor, temperature: torch.Tensor, uniform: torch.Tensor, params: list[SamplingParams]
) -> torch.Tensor:
    """Draw with top_k, top_p and min_p, which rarely keep more than NUM_LIKELIEST tokens.

    No sum adds a row in parts, as torch's sums do if there is only one row. A row's token would otherwise depend on the
    number of rows.
    """
    vocab_size = shifted.shape[1]
    cut = _Cut(
        temperature,
        top_k=torch.tensor([min(one.top_k or vocab_size, vocab_size) for one in params])[:, None],
        top_p=torch.tensor([one.top_p for one in params], dtype=torch.float32)[:, None],
        min_p=torch.tensor([one.min_p for one in params], dtype=torch.float32)[:, None],
    )
    probabilities = torch.softmax(shifted / temperature, dim=1)
    # The temperature changes the weights, but not their order.
    largest, order = torch.topk(shifted, min(NUM_LIKELIEST, vocab_size), dim=1)
    ordered = probabilities.gather(1, order)
    is_kept, is_enough = cut.kept(largest, ordered, vocab_size)
    token_ids = order.gather(1, _pick(torch.where(is_kept, ordered, 0.0), uniform)[:, None]).squeeze(1)
    rows = (~is_enough).nonzero().squeeze(1)
    if len(rows):
        token_ids[rows] = _draw_from_many(shifted[rows], probabilities[rows], uniform[rows], cut.of(rows))
    return token_ids


def _draw_from_many(
    shifted: torch.Tensor, probabilities: torch.Tensor, uniform: torch.Tensor, cut: _Cut
) -> torch.Tensor:
    """Draw in the order of the vocabulary. This needs only the sorted logits, but not the tokens' order, which would
    take 20 to 60 times as long.
    """
    largest = torch.from_numpy(-np.sort(-shifted.numpy(), axis=1))
    is_first, _ = cut.kept(largest, torch.softmax(largest / cut.temperature, dim=1), shifted.shape[1])
    num_kept = is_first.sum(1, keepdim=True)
    last = largest.gather(1, num_kept - 1)
    is_tied = shifted == last
    num_tied = num_kept - (largest > last).sum(1, keepdim=True)
    is_kept = (shifted > last) | is_tied & (is_tied.cumsum(dim=1) <= num_tied)
    return _pick(torch.where(is_kept, probabilities, 0.0), uniform)


@dataclass(frozen=True, slots=True, eq=False)
class _Cut:
    """How each row is truncated: `[num_rows, 1]` each. `top_k` is at most the size of the vocabulary."""

    temperature: torch.Tensor
    top_k: torch.Tensor
    top_p: torch.Tensor
    min_p: torch.Tensor

    def of(self, rows: torch.Tensor) -> _Cut:
        return _Cut(self.temperature[rows], self.top_k[rows], self.top_p[rows], self.min_p[rows])

    def kept(
        self, largest: torch.Tensor, probabilities: torch.Tensor, vocab_size: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Which of each row's most likely tokens are kept, and whether the row certainly keeps no others: bool
        `[num_rows, count]` and `[num_rows]`.

        `largest` contains their logits minus the row's maximum, in order, and `probabilities` their probabilities.
        """
        count = largest.shape[1]
        running = probabilities.cumsum(dim=1)
        # As in transformers and vLLM, top_p is a share of the tokens that top_k keeps.
        is_within = self.top_k <= count
        total = torch.where(is_within, running.gather(1, self.top_k.clamp(max=count) - 1), 1.0)
        mass = torch.where(self.top_p < 1, self.top_p * total, torch.inf)
        # The weight of the most likely token is 1, and min_p is a fraction of it.
        is_likely = (largest / self.temperature).exp() >= self.min_p
        is_kept = is_likely & (torch.arange(count) < self.top_k)
        is_kept[:, 1:] &= running[:, :-1] < mass
        # Always keep the most likely token, even with top_p = 0.
        is_kept[:, 0] = True
        is_total_known = (self.top_k == vocab_size) | (self.top_p >= 1)
        is_at_end = (running[:, -1:] >= mass) | ~is_likely[:, -1:]
        return is_kept, (is_within | is_total_known & is_at_end).squeeze(1)


def _pick(weights: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """For each row of `weights`, the first index at which its running sum exceeds `uniform` times its total."""
    cumulative = weights.cumsum(dim=1)
    index = torch.searchsorted(cumulative, uniform * cumulative[:, -1:], right=True).squeeze(1)
    # Rounding can select an index past the last token with a positive weight.
    last = weights.shape[1] - 1 - (weights > 0).flip(1).to(torch.int8).argmax(dim=1)
    return torch.minimum(index, last)


def _logprobs(logits: torch.Tensor, token_ids: list[int], samples: Sequence[SamplingRow]) -> dict[int, TokenLogprobs]:
    rows = [row for row, one in enumerate(samples) if one.params.num_logprobs is not None]
    if not rows:
        return {}
    logprobs = torch.log_softmax(logits[rows], dim=1)
    found: dict[int, TokenLogprobs] = {}
    for values, row in zip(logprobs, rows, strict=True):
        token_id = token_ids[row]
        top: tuple[tuple[int, float], ...] = ()
        count, asked = samples[row].params.num_logprobs, samples[row].params.logprob_token_ids
        if asked:
            named = dict.fromkeys((token_id, *asked))
            top = tuple(zip(named, values[list(named)].tolist(), strict=True))
        elif count:
            best = values.topk(min(count, values.shape[0]))
            top = tuple(zip(best.indices.tolist(), best.values.tolist(), strict=True))
        found[row] = TokenLogprobs(token_id, float(values[token_id]), top)
    return found


def used_temperature(temperature: float) -> float:
    """The temperature, clamped to a range that is safe in float32. Only a temperature of exactly 0 is greedy."""
    return min(max(temperature, LEAST_TEMPERATURE), MOST_TEMPERATURE) if temperature > 0 else 0.0


def philox(counters: npt.NDArray[np.uint64], keys: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011), computed per column.

    `counters` `[4, n]`, `keys` `[2, n]` and the result `[4, n]` contain 32-bit words.
    """
    even, odd = counters[0::2], counters[1::2]
    for _ in range(_NUM_ROUNDS):
        products = even * _MULTIPLIERS
        even = (products >> _HALF)[::-1] ^ odd ^ keys
        odd = (products & _WORD)[::-1]
        keys = (keys + _KEY_STEPS) & _WORD
    return np.stack([even[0], odd[0], even[1], odd[1]])


def uniforms(seeds: Iterable[int], counters: Iterable[int]) -> npt.NDArray[np.float32]:
    """Random multiples of 2**-24 in [0, 1): one for each pair of seed and counter.

    A number depends only on its seed (below 2**64) and its counter, not on preemptions or other sequences in the batch.
    """
    seed = np.array(list(seeds), np.uint64)
    place = np.array(list(counters), np.uint64)
    zero = np.zeros_like(place)
    words = philox(np.stack([place & _WORD, place >> _HALF, zero, zero]), np.stack([seed & _WORD, seed >> _HALF]))
    drawn: npt.NDArray[np.float32] = (words[0] >> np.uint64(8)).astype(np.float32) * np.float32(2.0**-24)
    return drawn
