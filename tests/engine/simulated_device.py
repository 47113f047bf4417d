"""A simulated device and its pages, without a model, for fast and deterministic tests of the engine's scheduling."""

from __future__ import annotations

import functools
import itertools
import math
import random
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from loramux.adapter_store.formats.packed.packing import PackedAdapter
from loramux.engine.adapters.adapter_load import AdapterLoad
from loramux.engine.constraints.grammar import NO_MASKS, Masks
from loramux.engine.decoder.vocabularies import FORBIDDEN
from loramux.engine.device.accelerator import HostAccelerator
from loramux.engine.execution.executor import StepGivenUp
from loramux.engine.execution.pooled_prompts import PooledPrompts, pool_prompts
from loramux.engine.execution.prompt_scores import ScoredPrompts, score_prompts
from loramux.engine.execution.sampler import FinishedStep, HeadDrafts, SampledToken, sample
from loramux.engine.pages.disk_pages import Transfer, TransferKind
from loramux.engine.pages.page_index import PageCopy
from loramux.engine.protocol.messages import SamplingParams
from loramux.engine.sequences.batch import Batch, RepeatedRows, samples_without
from loramux.engine.sequences.cache_groups import CacheLayout
from loramux.kernels.layout import AdapterLayout, RowCounts

UNWRITTEN = -1

GREEDY = SamplingParams(temperature=0.0, ignore_eos=True)
"""Settings that always choose the most likely token and ignore the end of sequence."""


@dataclass(frozen=True, slots=True, eq=False)
class SimulatedForward:
    """A step of a SimulatedExecutor, with the most likely token, the adapter slot and the state of each sample row, and
    the token of each row.
    """

    executor: SimulatedExecutor
    batch: Batch
    likeliest: list[int]
    slots: list[int]
    states: list[int]
    tokens: list[int]
    scored: ScoredPrompts | None = None
    pools: PooledPrompts | None = None

    def choose(self, masks: Masks = NO_MASKS, unused: Collection[int] = ()) -> FinishedStep:
        return self.executor.choose(self, masks, unused)


class SimulatedExecutor:
    """Computes tokens as a hash of the whole context, read through the page tables as attention would read it.

    Each position stores a state in place of K and V: `(state of the previous position) * 31 + token + position + salt`,
    modulo a prime, where the salt depends on the row's adapter. The next token is the sum of the states that windowed
    layers see (the last state if no layer has a window) plus the salt, modulo the size of the adapter's vocabulary. A
    wrong page, a wrongly shared page, a stale position or a wrong adapter changes the output. In a hybrid decoder, each
    sequence also keeps the state of its last position in its state pages. Drafts of a sequence change it one by one.

    If a batch has rows for the base's own head, the head stores at each position the token there and the one after it.
    Four times of five, it drafts the most likely token. The position before a page can have another sequence's token
    after it, as in a real pool.
    """

    def __init__(
        self,
        vocab_size: int,
        cache: CacheLayout,
        num_pages: int,
        adapter_pages: SimulatedPages,
        eos_token_ids: tuple[int, ...] = (),
    ) -> None:
        self._vocab_size = vocab_size
        self._block_tokens = cache.block_tokens
        self._windows = [group.window for group in cache.groups]
        self._num_state_pages = cache.num_state_pages
        self._page_places = max(group.page_step for group in cache.groups) * cache.block_tokens
        self._adapter_pages = adapter_pages
        self._eos_token_ids = eos_token_ids
        # Tokens of the previous step, for rows whose token was not yet on the host when the batch was built.
        self._chosen: list[int | None] = []
        self._states = [UNWRITTEN] * (num_pages * self._page_places)
        self._head_stored: dict[int, tuple[int, int]] = {}
        self.not_finite_for: set[str | None] = set()
        """The adapters whose rows are not finite. None is the base."""
        self.batches: list[Batch] = []
        self.is_unwanted: Callable[[], bool] = lambda: False

    def submit(self, batch: Batch) -> SimulatedForward:
        if self.is_unwanted():
            for place in batch.kv_slots.ravel().tolist():
                self._states[place] = UNWRITTEN
            raise StepGivenUp
        self.batches.append(batch)
        slots, sample_rows = batch.slots.tolist(), batch.sample_rows.tolist()
        salts = {slot: _salt(self._adapter_pages.digest_of_slot(slot)) for slot in set(slots)}
        sizes = {slot: self._vocab_size_of(slot) for slot in salts}
        # A row whose logits were not finite has no token. Its sequence ends without using this step's result.
        tokens = [token if token >= 0 else self._chosen[-1 - token] or 0 for token in batch.tokens.tolist()]
        states = self._write(batch, tokens, slots, salts, sizes)

        def likeliest(rows: list[int]) -> list[int]:
            return [(states[row] + salts[slots[row]]) % sizes[slots[row]] for row in rows]

        scored = None
        if batch.scores:
            scored_rows = batch.scored_rows.tolist()

            def logits_of(begin: int, end: int) -> torch.Tensor:
                rows = scored_rows[begin:end]
                return self._logits(likeliest(rows), [slots[row] for row in rows])

            scored = score_prompts(batch.scores, logits_of, HostAccelerator())
        pools = None
        if batch.pooled:
            rows = batch.pooled_rows.tolist()
            hidden = torch.tensor([self._hidden(states[row], slots[row]) for row in rows], dtype=torch.float64)

            def class_logits(chosen: list[int]) -> torch.Tensor:
                most = max(one.num_labels or 0 for one in batch.pooled)
                return hidden[chosen, None] + torch.arange(most)

            pools = pool_prompts(batch.pooled, hidden.view(-1, 1), class_logits, HostAccelerator())
        sample_slots = [slots[row] for row in sample_rows]
        sample_states = [] if batch.head is None else [states[row] for row in sample_rows]
        return SimulatedForward(self, batch, likeliest(sample_rows), sample_slots, sample_states, tokens, scored, pools)

    def choose(self, forward: SimulatedForward, masks: Masks, unused: Collection[int] = ()) -> FinishedStep:
        samples, chosen = samples_without(forward.batch.samples, unused), forward.likeliest
        num_greedy = [one.params for one in samples].count(GREEDY)
        if num_greedy == len(samples) and not self.not_finite_for and not masks:
            # This gives the same result as sampling, in a tenth of the time.
            sampled = [SampledToken(token) for token in chosen]
        else:
            sampled = sample(self._logits(chosen, forward.slots), samples, self._eos_token_ids, masks)
        self._chosen = [one.token_id for one in sampled]
        head, repeat = self._run_head(forward, self._chosen), functools.partial(self._repeat, forward.batch)
        return FinishedStep(sampled, forward.scored, forward.pools, head, repeat)

    def _repeat(self, batch: Batch, repeated: list[RepeatedRows]) -> None:
        """Turn each state, which must be that before the first row, into that after the last row."""
        for one in repeated:
            row = int(batch.sample_rows[one.begin])
            position = int(batch.positions[row])
            assert one.seq_len == position + one.num_rows
            places = [page * self._page_places for page in one.pages]
            if position:
                before = self._state_at(batch.blocks.tolist(), int(batch.block_starts[0, row]), position - 1)
                assert {self._states[place] for place in places} == {before}, "the state is not that before the rows"
            for place in places:
                self._states[place] = self._states[int(batch.kv_slots[0, row + one.num_rows - 1])]

    def _run_head(self, forward: SimulatedForward, chosen: list[int | None]) -> HeadDrafts | None:
        batch = forward.batch
        if batch.head is None:
            return None
        next_tokens, sample_rows = batch.head.next_tokens.tolist(), batch.sample_rows.tolist()
        for row, token in zip(sample_rows, chosen, strict=True):
            next_tokens[row] = token or 0
        for place, token, following in zip(batch.kv_slots[0].tolist(), forward.tokens, next_tokens, strict=True):
            self._head_stored[place] = (token, following)
        if not batch.head.is_drafting:
            return None
        drafted: list[int | None] = []
        for row, state, slot in zip(sample_rows, forward.states, forward.slots, strict=True):
            position = int(batch.positions[row])
            if row == 0 or batch.block_starts[0, row] != batch.block_starts[0, row - 1]:
                self._check_head(batch, row, position)
            salt, size = _salt(self._adapter_pages.digest_of_slot(slot)), self._vocab_size_of(slot)
            following = _next_state(state, next_tokens[row], position + 1, salt)
            drafted.append((following + salt + (following % 5 == 0)) % size)
        return HeadDrafts(drafted, [False] * len(drafted), 0.0)

    def _check_head(self, batch: Batch, row: int, position: int) -> None:
        """Assert that each position before the first row of a sequence has the token after it."""
        block_start = int(batch.block_starts[0, row])
        blocks = batch.blocks[block_start + np.arange(position // self._block_tokens + 1)].tolist()
        stored = [
            self._head_stored[blocks[place // self._block_tokens] * self._block_tokens + place % self._block_tokens]
            for place in range(position + 1)
        ]
        for place, ((_, following), (token, _)) in enumerate(itertools.pairwise(stored), 1):
            assert following == token or place % self._block_tokens == 0, "the head has another token after a position"

    def _hidden(self, state: int, slot: int) -> float:
        """The hidden state of a row, which has a size of 1. float32 holds it exactly."""
        is_broken = self._adapter_pages.digest_of_slot(slot) in self.not_finite_for
        return math.nan if is_broken else float(state % 4096)

    def _logits(self, chosen: list[int], slots: list[int]) -> torch.Tensor:
        sizes = [self._vocab_size_of(slot) for slot in slots]
        logits = torch.zeros(len(chosen), max([self._vocab_size, *sizes]))
        for row, (token, slot, size) in enumerate(zip(chosen, slots, sizes, strict=True)):
            logits[row, token] = 1.0
            logits[row, size:] = FORBIDDEN
            if self._adapter_pages.digest_of_slot(slot) in self.not_finite_for:
                logits[row] = torch.nan
        return logits

    def _vocab_size_of(self, slot: int) -> int:
        return self._adapter_pages.vocab_size_of_slot(slot) or self._vocab_size

    def generate(
        self,
        prompt: Sequence[int],
        num_tokens: int,
        digest: str | None,
        activation: int = 0,
        vocab_size: int | None = None,
    ) -> list[int]:
        """The tokens that a correct engine must produce if the adapter applies to the prompt from `activation` on.

        `vocab_size` is the size of the adapter's vocabulary, or None for the base's vocabulary.
        """
        state, states, tokens, salt = 0, [], list(prompt), _salt(digest)
        for position, token in enumerate(prompt):
            state = _next_state(state, token, position, salt if position >= activation else _salt(None))
            states.append(state)
        window = next((one for one in self._windows if one is not None), 1)
        while len(tokens) < len(prompt) + num_tokens:
            token = (sum(states[-window:]) + salt) % (vocab_size or self._vocab_size)
            state = _next_state(state, token, len(tokens), salt)
            tokens.append(token)
            states.append(state)
        return tokens[len(prompt) :]

    def pool(self, prompt: Sequence[int], pooling: str, digest: str | None, activation: int = 0) -> float:
        """The pooled hidden state that a correct engine must return, if no layer has a window."""
        state, states = 0, []
        for position, token in enumerate(prompt):
            state = _next_state(state, token, position, _salt(digest if position >= activation else None))
            states.append(state % 4096)
        return {"last": states[-1], "cls": states[0], "mean": sum(states) / len(states)}[pooling]

    def copy_page(self, source: int, target: int) -> None:
        self.fill_page(target, self.page_states(source))

    def page_states(self, page: int) -> list[int]:
        size = self._page_places
        return self._states[page * size : (page + 1) * size]

    def fill_page(self, page: int, states: list[int]) -> None:
        size = self._page_places
        assert len(states) == size
        self._states[page * size : (page + 1) * size] = states

    def forget(self, pages: Iterable[int]) -> None:
        """Treat the contents of these pages as never written."""
        for page in pages:
            first = page * self._page_places
            self._states[first : first + self._page_places] = [UNWRITTEN] * self._page_places

    def _write(
        self, batch: Batch, tokens: list[int], slots: list[int], salts: dict[int, int], sizes: dict[int, int]
    ) -> list[int]:
        """Compute each row's state from the previous state in its context, and store it in the row's KV slots.

        Returns each row's state or, with windowed layers, the sum of the states in the row's windows.
        """
        stored, block_tokens = self._states, self._block_tokens
        blocks, kv_slots = batch.blocks.tolist(), batch.kv_slots.tolist()
        cu_q, seq_lens, starts = batch.cu_q.tolist(), batch.seq_lens.tolist(), batch.block_starts.tolist()
        state_starts, first_slots = batch.state_starts.tolist(), kv_slots[0]
        is_plain, is_hybrid = self._windows == [None], self._num_state_pages > 0
        written: list[int] = []
        for sequence, (begin, end, seq_len) in enumerate(zip(cu_q, cu_q[1:], seq_lens, strict=False)):
            assert len({*slots[begin:end]} - {-1}) <= 1, "a sequence has one adapter"
            position, block_start = seq_len - (end - begin), starts[0][sequence]
            if is_hybrid:
                first = state_starts[sequence]
                state_places = [page * self._page_places for page in blocks[first : first + self._num_state_pages]]
                if position:
                    last = self._state_at(blocks, block_start, position - 1)
                    assert {stored[place] for place in state_places} == {last}, "a stale state page"
            for row in range(begin, end):
                assert tokens[row] < sizes[slots[row]], "the row's adapter lacks this token"
                before = 0
                if position:
                    # `_state_at`, inlined, because a simulated step spends most of its time here.
                    block = blocks[block_start + (position - 1) // block_tokens]
                    before = stored[block * block_tokens + (position - 1) % block_tokens]
                    assert before != UNWRITTEN, f"position {position - 1} was never written"
                state = stored[first_slots[row]] = _next_state(before, tokens[row], position, salts[slots[row]])
                if is_plain:
                    written.append(state)
                else:
                    seen = state
                    for window, group_starts, group_slots in zip(self._windows, starts, kv_slots, strict=True):
                        stored[group_slots[row]] = state
                        if window is not None:
                            visible = range(max(0, position + 1 - window), position)
                            seen += sum([self._state_at(blocks, group_starts[sequence], one) for one in visible])
                    written.append(seen)
                position += 1
            if is_hybrid:
                for place in state_places:
                    stored[place] = state
        return written

    def _state_at(self, blocks: list[int], block_start: int, position: int) -> int:
        block = blocks[block_start + position // self._block_tokens]
        state = self._states[block * self._block_tokens + position % self._block_tokens]
        assert state != UNWRITTEN, f"position {position} was never written"
        return state


class SimulatedHostMemory:
    """Slots for copies of the executor's pages. Slots that are empty, or have been forgotten, cannot be loaded."""

    def __init__(self, executor: SimulatedExecutor, num_slots: int, load_s: float = 0.0) -> None:
        self.num_slots = num_slots
        self.load_s = load_s
        self._executor = executor
        self._slots: dict[int, list[int]] = {}

    def save(self, page: int, slot: int) -> None:
        assert slot in range(self.num_slots)
        self._slots[slot] = self._executor.page_states(page)

    def load(self, slot: int, page: int) -> None:
        assert slot in self._slots, "an empty slot"
        self._executor.fill_page(page, self._slots[slot])

    def content(self, slot: int) -> list[int]:
        assert slot in self._slots, "an empty slot"
        return self._slots[slot]

    def fill(self, slot: int, states: list[int]) -> None:
        self._slots[slot] = states

    def forget(self, slots: Iterable[int]) -> None:
        """Treat the contents of these slots as never written."""
        for slot in slots:
            self._slots.pop(slot, None)


class SimulatedDisk:
    """Slots on disk for copies of the host memory's slots. Each transfer takes effect when it ends, as late as a real
    one may: at a `poll` of the engine, reads first.

    Some of the transfers stay under way at each poll, and some reads and writes fail, by chance.
    """

    def __init__(
        self, memory: SimulatedHostMemory, num_slots: int, rng: random.Random | None = None, read_s: float = 0.0
    ) -> None:
        """Without `rng`, all transfers succeed at the next poll."""
        self.num_slots = num_slots
        self.read_s = read_s
        self.is_holding = False
        """True if no transfer ends."""
        self.fails = False
        """True if all transfers fail."""
        self.num_started = 0
        self._memory = memory
        self._rng = rng
        self._slots: dict[int, tuple[bytes, list[int]]] = {}
        self._reads: list[Transfer] = []
        self._others: list[Transfer] = []

    def start(self, transfer: Transfer) -> None:
        self.num_started += 1
        (self._reads if transfer.kind is TransferKind.READ else self._others).append(transfer)

    def erase(self, pages: Iterable[PageCopy]) -> None:
        for page in pages:
            self.start(Transfer(TransferKind.ERASE, page))

    def poll(self) -> list[tuple[Transfer, bool]]:
        ended: list[tuple[Transfer, bool]] = []
        while (queue := self._reads or self._others) and not self.is_holding:
            if self._rng is not None and self._rng.random() < 0.1:
                break
            transfer = queue.pop(0)
            is_unlucky = self._rng is not None and self._rng.random() < 0.05
            fails = self.fails or (is_unlucky and transfer.kind is not TransferKind.ERASE)
            ended.append((transfer, not fails and self._carry_out(transfer)))
        return ended

    @property
    def num_queued(self) -> int:
        return len(self._reads) + len(self._others)

    def contents(self) -> list[bytes]:
        """The keys of the pages in all slots, even of those that can no longer be found."""
        return [key for key, _ in self._slots.values()]

    def close(self) -> None:
        """Do nothing, because there is no thread."""

    def _carry_out(self, transfer: Transfer) -> bool:
        page = transfer.page
        match transfer.kind:
            case TransferKind.WRITE:
                self._slots[page.slot] = page.key, self._memory.content(transfer.host_slot)
            case TransferKind.READ:
                key, states = self._slots[page.slot]
                assert key == page.key, "the slot has another page"
                self._memory.fill(transfer.host_slot, states)
            case TransferKind.ERASE:
                self._slots.pop(page.slot, None)
        return True


def _next_state(before: int, token: int, position: int, salt: int) -> int:
    return (before * 31 + token + position + salt) % 2_147_483_647


@functools.cache
def _salt(digest: str | None) -> int:
    return 0 if digest is None else sum(digest.encode())


def simulated_adapters(
    num_pages: Mapping[str, int],
    vocab_sizes: Mapping[str, int] | None = None,
    num_labels: Mapping[str, int] | None = None,
) -> dict[str, PackedAdapter]:
    """Adapters by digest, with the numbers of pages in `num_pages`, and one byte per page. `vocab_sizes` lists the
    vocabulary sizes that differ from the base's. `num_labels` lists the numbers of classes of classifiers.
    """
    ranks, scales = np.zeros((0, 0), np.int32), np.zeros((0, 0), np.float32)
    offsets, sizes, labels = np.zeros((0, 0, 3), np.int32), vocab_sizes or {}, num_labels or {}
    layouts = {
        digest: AdapterLayout(
            ranks, offsets, number, rows=RowCounts(vocab_size=sizes.get(digest), num_labels=labels.get(digest))
        )
        for digest, number in num_pages.items()
    }
    return {
        digest: PackedAdapter(digest, layout, scales, np.zeros((layout.num_pages, 1, 1), np.uint8))
        for digest, layout in layouts.items()
    }


class SimulatedPages:
    """The copier and the table writer of an adapter pool. Records which adapter is in each slot.

    A copy finishes at the next `poll`. A copy requested while `is_holding` is set finishes at the first `poll` after
    `let_go`.
    """

    def __init__(self) -> None:
        self._copied: list[AdapterLoad] = []
        self._withheld: list[AdapterLoad] = []
        self._slots: dict[int, PackedAdapter] = {}
        self.is_holding = False

    def digest_of_slot(self, slot: int) -> str | None:
        return None if slot < 0 else self._slots[slot].digest

    def vocab_size_of_slot(self, slot: int) -> int | None:
        """Vocabulary size of the slot's adapter, or None if it has the base's vocabulary."""
        return None if slot < 0 else self._slots[slot].layout.rows.vocab_size

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
        self._slots[slot] = packed

    def close(self) -> None:
        """Do nothing, because no copy runs in the background."""
