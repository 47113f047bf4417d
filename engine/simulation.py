"""A device and a loader without a model: the engine's scheduling runs on them at full speed, deterministically."""

from __future__ import annotations

import numpy as np
import torch

from loramux.engine.adapter_pool import Copied, Fetched, LoadEvent, LoadFailed
from loramux.engine.batch import Batch
from loramux.kernels.layout import AdapterLayout
from loramux.kernels.tables import AttentionBatch


class SimulatedExecutor:
    """Checks each batch as a real device would trust it, and answers with a function of token, position and adapter.

    The next token of a row is `(token * 31 + position * 7 + salt of the row's adapter) % vocab_size`, so a wrong page,
    position or adapter shows itself in the output.
    """

    def __init__(self, vocab_size: int, page_tokens: int, num_pages: int, loader: SimulatedLoader) -> None:
        self._vocab_size = vocab_size
        self._page_tokens = page_tokens
        self._loader = loader
        # What the K and V of each token slot of the pool were computed from: (token, position), or nothing.
        self._kv: list[tuple[int, int] | None] = [None] * (num_pages * page_tokens)
        self.not_finite_for: set[str] = set()
        self.batches: list[Batch] = []

    def execute(self, batch: Batch) -> torch.Tensor:
        self.batches.append(batch)
        tokens, positions = batch.tokens.tolist(), batch.positions.tolist()
        for token, position, kv_slot in zip(tokens, positions, batch.attention.kv_slots.tolist(), strict=True):
            self._kv[kv_slot] = (token, position)
        self._check_contexts(batch.attention)
        logits = torch.zeros(len(batch.sample_rows), self._vocab_size)
        for row, sample_row in enumerate(batch.sample_rows.tolist()):
            digest = self._loader.digest_of_slot(int(batch.slots[sample_row]))
            if digest in self.not_finite_for:
                logits[row] = torch.nan
                continue
            logits[row, self.next_token(tokens[sample_row], positions[sample_row], digest)] = 1.0
        return logits

    def next_token(self, token: int, position: int, digest: str | None) -> int:
        salt = 0 if digest is None else sum(digest.encode())
        return (token * 31 + position * 7 + salt) % self._vocab_size

    def _check_contexts(self, attention: AttentionBatch) -> None:
        """Every position of every context must lie where its page table says."""
        for pages, seq_len in zip(attention.page_table.tolist(), attention.seq_lens.tolist(), strict=True):
            for position in range(seq_len):
                page, offset = pages[position // self._page_tokens], position % self._page_tokens
                entry = self._kv[page * self._page_tokens + offset]
                assert entry is not None, f"position {position} was never written"
                assert entry[1] == position, f"position {position} was overwritten by position {entry[1]}"


class SimulatedLoader:
    """Adapters of given page counts; `hold` keeps loads waiting until `let_go`."""

    def __init__(self, num_pages: dict[str, int]) -> None:
        self._num_pages = num_pages
        self._events: list[LoadEvent] = []
        self._held: list[LoadEvent] = []
        self._slots: dict[int, str] = {}
        self.is_holding = False
        self.num_fetches = 0

    def digest_of_slot(self, slot: int) -> str | None:
        return None if slot < 0 else self._slots[slot]

    def fetch(self, digest: str) -> None:
        self.num_fetches += 1
        if digest not in self._num_pages:
            self._report(LoadFailed(digest, "the store has no such adapter"))
            return
        empty = np.zeros((0, 0), np.int32)
        self._report(Fetched(digest, AdapterLayout(empty, empty, self._num_pages[digest])))

    def copy(self, digest: str, pages: list[int]) -> None:
        self._report(Copied(digest))

    def publish(self, digest: str, slot: int, pages: list[int]) -> None:
        self._slots[slot] = digest

    def drop(self, digest: str) -> None:
        """Nothing is held in memory."""

    def events(self) -> list[LoadEvent]:
        events, self._events = self._events, []
        return events

    def let_go(self) -> None:
        self._events.extend(self._held)
        self._held.clear()
        self.is_holding = False

    def _report(self, event: LoadEvent) -> None:
        (self._held if self.is_holding else self._events).append(event)
