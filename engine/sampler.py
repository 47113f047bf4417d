"""Chooses the next token of each row; a row's choice depends on nothing but its own logits, settings and stream."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import numpy as np
import numpy.typing as npt
import torch

from loramux.engine.logit_edits import LogitEdits
from loramux.engine.messages import SamplingParams, TokenLogprobs
from loramux.engine.random_streams import uniforms
from loramux.engine.sampling_limits import used_temperature

NUM_LIKELIEST = 1024
"""Tokens that top_k, top_p and min_p look at before they sort the whole vocabulary."""


class SamplingRow(msgspec.Struct, frozen=True, gc=False):
    """What decides one token: the settings, the stream's seed, and how many tokens the sequence chose before.

    `edits` are the sequence's, where its settings ask for any: see `logit_edits`.
    """

    params: SamplingParams
    seed: int
    num_chosen: int
    edits: LogitEdits | None = None

    @property
    def is_short(self) -> bool:
        """Whether no token may end the sequence yet."""
        return self.num_chosen < self.params.min_tokens

    def forbidden(self, eos_token_ids: tuple[int, ...]) -> set[int]:
        """The tokens that would end the sequence too early."""
        if not self.is_short:
            return set()
        return {*self.params.stop_token_ids, *(() if self.params.ignore_eos else eos_token_ids)}


class SampledToken(msgspec.Struct, frozen=True, gc=False):
    """The choice for one row. `token_id` is None when the row's logits are not finite."""

    token_id: int | None
    logprobs: TokenLogprobs | None = None


@dataclass(frozen=True, slots=True)
class FinishedStep:
    """The result of a step whose tokens were chosen when it was submitted."""

    sampled: list[SampledToken]

    def tokens(self) -> list[SampledToken]:
        return self.sampled


def sample(logits: torch.Tensor, samples: Sequence[SamplingRow], eos_token_ids: tuple[int, ...]) -> list[SampledToken]:
    """Sample one token a row of `logits`, float32 `[num_rows, vocab_size]`, as `samples` say.

    As in vLLM the bias comes first, then the penalties, the temperature, and what top_k, top_p and min_p leave out.
    Log-probabilities are those of the model before all of that, as the OpenAI API defines them.
    """
    if not samples:
        return []
    # One value that is not finite makes its row's sum so too, and a sum is far cheaper than a look at each.
    is_finite = torch.isfinite(logits.sum(dim=1)).tolist()
    if not all(is_finite):
        # The sum of finite values may overflow.
        is_finite = torch.isfinite(logits).all(dim=1).tolist()
    # numpy compares eight values at a time; torch takes ten times as long on a CPU.
    token_ids = torch.from_numpy(logits.numpy().argmax(axis=1))
    changed = _changed(logits, samples, eos_token_ids)
    for row, values in changed.items():
        token_ids[row] = values.argmax()
    random_rows = [row for row, one in enumerate(samples) if one.params.temperature > 0 and is_finite[row]]
    if random_rows:
        drawn = logits[random_rows]
        for place, row in enumerate(random_rows):
            if row in changed:
                drawn[place] = changed[row]
        token_ids[random_rows] = _draw(drawn, [samples[row] for row in random_rows])
    ids = token_ids.tolist()
    for one, token_id in zip(samples, ids, strict=True):
        if one.edits is not None:
            one.edits.note(token_id, one.num_chosen)
    logprobs = _logprobs(logits, ids, samples)
    return [
        SampledToken(token_id, logprobs.get(row)) if is_finite[row] else SampledToken(None)
        for row, token_id in enumerate(ids)
    ]


def uniforms_of(samples: Sequence[SamplingRow]) -> npt.NDArray[np.float32]:
    """The numbers in [0, 1) that decide the tokens of `samples`."""
    return uniforms((one.seed for one in samples), (one.num_chosen for one in samples))


def _changed(
    logits: torch.Tensor, samples: Sequence[SamplingRow], eos_token_ids: tuple[int, ...]
) -> dict[int, torch.Tensor]:
    """The logits of the rows whose settings change them, `[vocab_size]` each; other rows are not even copied."""
    changed: dict[int, torch.Tensor] = {}
    for row, one in enumerate(samples):
        forbidden = one.forbidden(eos_token_ids)
        if one.edits is None and not forbidden:
            continue
        values = changed[row] = logits[row].clone()
        if one.edits is not None:
            one.edits.apply(values, one.num_chosen)
        if forbidden:
            values[list(forbidden)] = -torch.inf
    return changed


def _draw(logits: torch.Tensor, samples: Sequence[SamplingRow]) -> torch.Tensor:
    """Draw from the softmax of `logits / temperature`, kept to what top_k, top_p and min_p leave."""
    params = [one.params for one in samples]
    temperature = torch.tensor([used_temperature(one.temperature) for one in params], dtype=torch.float32)[:, None]
    # Subtracting the maximum first keeps a tiny temperature from overflowing.
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
    """Draw within top_k, top_p and min_p: they need the likeliest tokens in order, seldom all of them."""
    vocab_size = shifted.shape[1]
    top_k = torch.tensor([one.top_k or vocab_size for one in params])[:, None]
    top_p = torch.tensor([one.top_p for one in params], dtype=torch.float32)[:, None]
    min_p = torch.tensor([one.min_p for one in params], dtype=torch.float32)[:, None]
    normaliser = torch.logsumexp(shifted / temperature, dim=1, keepdim=True)
    count = min(NUM_LIKELIEST, vocab_size)
    while True:
        # A temperature evens weights, not the order.
        largest, order = torch.topk(shifted, count, dim=1)
        ordered = largest / temperature
        probabilities = (ordered - normaliser).exp()
        # The likeliest token's is 1: min_p is a share of it.
        is_likely = ordered.exp() >= min_p
        is_enough = (probabilities.sum(1, True) >= top_p) | (top_k <= count) | ~is_likely[:, -1:]
        if count == vocab_size or bool(is_enough.all()):
            break
        count = vocab_size
    before = probabilities.cumsum(dim=1) - probabilities
    keep = (torch.arange(count) < top_k) & (before < top_p) & is_likely
    # The likeliest token always stays, also with top_p = 0.
    keep[:, 0] = True
    return order.gather(1, _pick(torch.where(keep, probabilities, 0.0), uniform)[:, None]).squeeze(1)


def _pick(weights: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """The index at which the running sum of each row of `weights` passes the share `uniform` of the whole."""
    cumulative = weights.cumsum(dim=1)
    index = torch.searchsorted(cumulative, uniform * cumulative[:, -1:], right=True).squeeze(1)
    # Rounding may lead past the last token that has any weight.
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
        count = samples[row].params.num_logprobs
        if count:
            best = values.topk(min(count, values.shape[0]))
            top = tuple(zip(best.indices.tolist(), best.values.tolist(), strict=True))
        found[row] = TokenLogprobs(token_id, float(values[token_id]), top)
    return found
