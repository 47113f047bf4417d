"""A device and its pages without a model: the engine's scheduling runs on them at full speed, deterministically."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence

import numpy as np
import torch

from loramux.adapter_store.formats.packing import PackedAdapter
from loramux.engine.adapters.adapter_load import AdapterLoad
from loramux.engine.batch import Batch
from loramux.engine.execution.sampler import FinishedStep, SampledToken, sample
from loramux.engine.messages import SamplingParams
from loramux.kernels.layout import AdapterLayout

UNWRITTEN = -1

GREEDY = SamplingParams(temperature=0.0, ignore_eos=True)
"""The settings under which nothing but the likeliest token matters."""


class SimulatedExecutor:
    """Answers with a function of the whole context, read through the page tables as attention would read it.

    The K and V of a position stand for `(state of the position before it) * 31 + token + position + salt`, modulo a
    prime, where the salt is the adapter's; the next token is the last state and the salt, modulo the vocabulary. A
    wrong page, a shared page, a stale position or another adapter therefore changes the output.
    """

    def __init__(
        self,
        vocab_size: int,
        page_tokens: int,
        num_pages: int,
        adapter_pages: SimulatedPages,
        eos_token_ids: tuple[int, ...] = (),
    ) -> None:
        self._vocab_size = vocab_size
        self._page_tokens = page_tokens
        self._adapter_pages = adapter_pages
        self._eos_token_ids = eos_token_ids
        # What the step before chose, for rows whose token the host did not know when it built the batch.
        self._chosen: list[int | None] = []
        self._states = [UNWRITTEN] * (num_pages * page_tokens)
        self.not_finite_for: set[str] = set()
        self.batches: list[Batch] = []

    def submit(self, batch: Batch) -> FinishedStep:
        self.batches.append(batch)
        slots, sample_rows = batch.slots.tolist(), batch.sample_rows.tolist()
        salts = {slot: _salt(self._adapter_pages.digest_of_slot(slot)) for slot in set(slots)}
        states = self._write(batch, slots, salts)
        chosen = [self._next_token(states[row], salts[slots[row]]) for row in sample_rows]
        num_greedy = [one.params for one in batch.samples].count(GREEDY)
        if num_greedy == len(batch.samples) and not self.not_finite_for:
            # What sampling would come to, at a tenth of its time.
            sampled = [SampledToken(token) for token in chosen]
        else:
            digests = [self._adapter_pages.digest_of_slot(slots[row]) for row in sample_rows]
            sampled = sample(self._logits(chosen, digests), batch.samples, self._eos_token_ids)
        self._chosen = [one.token_id for one in sampled]
        return FinishedStep(sampled)

    def _logits(self, chosen: list[int], digests: list[str | None]) -> torch.Tensor:
        logits = torch.zeros(len(chosen), self._vocab_size)
        for row, (token, digest) in enumerate(zip(chosen, digests, strict=True)):
            logits[row, token] = 1.0
            if digest in self.not_finite_for:
                logits[row] = torch.nan
        return logits

    def generate(self, prompt: Sequence[int], num_tokens: int, digest: str | None) -> list[int]:
        """What a sequence must receive."""
        state, tokens, salt = 0, list(prompt), _salt(digest)
        for position, token in enumerate(prompt):
            state = _next_state(state, token, position, salt)
        while len(tokens) < len(prompt) + num_tokens:
            token = self._next_token(state, salt)
            state = _next_state(state, token, len(tokens), salt)
            tokens.append(token)
        return tokens[len(prompt) :]

    def _write(self, batch: Batch, slots: list[int], salts: dict[int, int]) -> list[int]:
        """Compute each row's state from the one before it in its context and store it where the batch says."""
        stored, page_tokens = self._states, self._page_tokens
        pages, kv_slots = batch.pages.tolist(), batch.kv_slots.tolist()
        cu_q, seq_lens, page_starts = batch.cu_q.tolist(), batch.seq_lens.tolist(), batch.page_starts.tolist()
        # A token that was not finite has no number; its sequence ends without another look at this row.
        tokens = [token if token >= 0 else self._chosen[-1 - token] or 0 for token in batch.tokens.tolist()]
        written: list[int] = []
        for begin, end, seq_len, page_start in zip(cu_q, cu_q[1:], seq_lens, page_starts, strict=False):
            assert slots[begin:end].count(slots[begin]) == end - begin, "a sequence has one adapter"
            salt = salts[slots[begin]]
            position = seq_len - (end - begin)
            for row in range(begin, end):
                before = 0
                if position:
                    page = pages[page_start + (position - 1) // page_tokens]
                    before = stored[page * page_tokens + (position - 1) % page_tokens]
                    assert before != UNWRITTEN, f"position {position - 1} was never written"
                state = stored[kv_slots[row]] = _next_state(before, tokens[row], position, salt)
                written.append(state)
                position += 1
        return written

    def _next_token(self, state: int, salt: int) -> int:
        return (state + salt) % self._vocab_size


def _next_state(before: int, token: int, position: int, salt: int) -> int:
    return (before * 31 + token + position + salt) % 2_147_483_647


@functools.cache
def _salt(digest: str | None) -> int:
    """Stands for an adapter's weights."""
    return 0 if digest is None else sum(digest.encode())


def simulated_adapters(num_pages: Mapping[str, int]) -> dict[str, PackedAdapter]:
    """Adapters of so many pages, without contents, by digest."""
    ranks, scales, payload = np.zeros((0, 0), np.int32), np.zeros((0, 0), np.float32), np.zeros((0, 0, 0), np.uint8)
    return {
        digest: PackedAdapter(digest, AdapterLayout(ranks, np.zeros((0, 0, 2), np.int32), number), scales, payload)
        for digest, number in num_pages.items()
    }


class SimulatedPages:
    """An adapter pool's copier and tables: knows whose adapter is in each slot.

    A copy takes until the next `poll`, or, where it was asked for while `is_holding`, until `let_go`.
    """

    def __init__(self) -> None:
        self._copied: list[AdapterLoad] = []
        self._withheld: list[AdapterLoad] = []
        self._slots: dict[int, str] = {}
        self.is_holding = False

    def digest_of_slot(self, slot: int) -> str | None:
        return None if slot < 0 else self._slots[slot]

    def copy(self, load: AdapterLoad) -> None:
        (self._withheld if self.is_holding else self._copied).append(load)

    def poll(self) -> list[tuple[AdapterLoad, str | None]]:
        copied, self._copied = self._copied, []
        return [(load, None) for load in copied]

    def let_go(self) -> None:
        self._copied += self._withheld
        self._withheld.clear()
        self.is_holding = False

    def write(self, slot: int, pages: list[int], packed: PackedAdapter) -> None:
        self._slots[slot] = packed.digest

    def close(self) -> None:
        """Nothing is under way."""
