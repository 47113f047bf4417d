"""The rows of one step: the host's layout, and the tensors that a forward pass reads."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from itertools import accumulate

import msgspec
import numpy as np
import numpy.typing as npt
import torch

from loramux.engine.constraints.logit_penalties import LogitPenalties
from loramux.engine.protocol.messages import SamplingParams
from loramux.engine.sequences.layer_groups import ALL_GROUPS, LayerGroups
from loramux.engine.sequences.sequence import Sequence
from loramux.kernels.tables import AttentionBatch, Segments


class SamplingRow(msgspec.Struct, frozen=True, gc=False):
    """Everything besides the logits that determines one token: settings, seed, and the number of tokens already chosen.

    `logit_penalties` is None if the settings request neither bias nor penalties.
    """

    params: SamplingParams
    seed: int
    num_chosen: int
    logit_penalties: LogitPenalties | None = None

    @property
    def is_short(self) -> bool:
        """True if the sequence is still below its `min_tokens`, so no token may end it yet."""
        return self.num_chosen < self.params.min_tokens

    def forbidden(self, eos_token_ids: tuple[int, ...]) -> set[int]:
        """The tokens that must not be chosen because they would end the sequence too early."""
        if not self.is_short:
            return set()
        return {*self.params.stop_token_ids, *(() if self.params.ignore_eos else eos_token_ids)}


_UNUSED = SamplingRow(SamplingParams(temperature=0.0), 0, 0)


def samples_without(samples: tuple[SamplingRow, ...], unused: Collection[int]) -> tuple[SamplingRow, ...]:
    """Replace the rows `unused` with rows that have no side effects, such as marks for penalties."""
    return tuple(_UNUSED if row in unused else one for row, one in enumerate(samples)) if unused else samples


class ScheduledSequence(msgspec.Struct, frozen=True, gc=False):
    """The next `num_tokens` tokens of a sequence, run in one step, starting at position `sequence.num_computed`.

    `drafts` are tokens that may follow the sequence's newest token. Each has a row of its own, after which a token is
    sampled. Only a sequence whose tokens are all committed, and whose next row is a decode row, has drafts.
    """

    sequence: Sequence
    num_tokens: int
    drafts: tuple[int, ...] = ()

    @property
    def num_rows(self) -> int:
        return self.num_tokens + len(self.drafts)


class ScoredRows(msgspec.Struct, frozen=True, gc=False):
    """Adjacent rows of one sequence's prompt. The logits of row `begin + i` score `token_ids[i]`, the token after it.

    `count` is the number of most likely tokens to report. `token_ids` is empty if the step only recomputes rows that
    were scored before a preemption.
    """

    begin: int
    token_ids: tuple[int, ...]
    count: int


class PooledRows(msgspec.Struct, frozen=True, gc=False):
    """Adjacent rows `[begin, begin + num_rows)` of one sequence's prompt, whose hidden states are added up.

    `num_rows` is 0 if none of the step's rows are pooled. `is_last` is True if the step ends the prompt. With
    `num_labels`, the logits of these classes are wanted instead, and there is at most one row.
    """

    begin: int
    num_rows: int
    is_last: bool
    num_labels: int | None = None


@dataclass(frozen=True, slots=True, eq=False)
class RepeatedRows:
    """Adjacent rows of one sequence in a finished step, whose effect on a state is repeated.

    `begin` is the index of the first row among the step's sample rows. `pages` contain the state before the first row.
    `seq_len` is the length of the context with the last row.
    """

    begin: int
    num_rows: int
    seq_len: int
    pages: array[int]


RepeatRows = Callable[[list[RepeatedRows]], None]
"""Repeats rows of a finished step. Call this before the next step is submitted."""


class HeadRows(msgspec.Struct, frozen=True, eq=False, gc=False):
    """What the base's own head for drafts reads at the end of a step, besides the states of the step's rows.

    `next_tokens` int32 `[num_tokens]` is the token after each row. It is 0 after the rows whose next token the step
    chooses, and after the last row of a pooled prompt. The head stores its K and V of all rows. With `is_drafting`, it
    also drafts the token after each token that the step chooses.
    """

    next_tokens: npt.NDArray[np.int32]
    is_drafting: bool


class Batch(msgspec.Struct, frozen=True, eq=False, kw_only=True, gc=False):
    """The host's description of one step. Sequences with the same adapter are adjacent. Rows of a prompt before its
    adapter's activation belong to the base.

    Each row of a draft counts as a sequence of its own, which shares the blocks of the sequence that it belongs to. A
    step of decode rows and drafts therefore has one row per sequence, like any decode.

    Sequence `i` has rows `[cu_q[i], cu_q[i + 1])`, at most `max_q` of them, and a context `[0, seq_lens[i])`. In group
    `g` of the layers, block `blocks[block_starts[g, i] + p // block_tokens]` stores the K and V of each position `p`
    that a row sees. `kv_slots` int64 `[num_groups, num_tokens]` contains `block * block_tokens + p % block_tokens` for
    each row's own position. `state_starts` `[num_sequences]` contains the index in `blocks` of each sequence's first
    state page, which a draft shares with its sequence. It is empty unless the decoder is hybrid. All other arrays are
    int32.

    `tokens` `[num_tokens]`: an entry `-1 - k` stands for token `k` chosen by the previous step, which may so far exist
    only on the device. `positions` and `slots` `[num_tokens]`: each row's position and adapter slot, -1 for the base.
    After each of `sample_rows` `[num_samples]`, a token is sampled according to `samples`. `scores` has an entry for
    each sequence that still needs scores of prompt tokens. `pooled` has an entry for each pooled sequence. `head` is
    None unless the engine uses the base's own head for drafts.
    """

    tokens: npt.NDArray[np.int32]
    positions: npt.NDArray[np.int32]
    slots: npt.NDArray[np.int32]
    cu_q: npt.NDArray[np.int32]
    seq_lens: npt.NDArray[np.int32]
    blocks: npt.NDArray[np.int32]
    block_starts: npt.NDArray[np.int32]
    kv_slots: npt.NDArray[np.int64]
    state_starts: npt.NDArray[np.int32]
    max_q: int
    sample_rows: npt.NDArray[np.int32]
    samples: tuple[SamplingRow, ...]
    scores: tuple[ScoredRows, ...] = ()
    pooled: tuple[PooledRows, ...] = ()
    head: HeadRows | None = None

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    @property
    def num_sequences(self) -> int:
        return len(self.seq_lens)

    @property
    def scored_rows(self) -> npt.NDArray[np.int32]:
        """The rows whose logits score prompt tokens, int32 `[num_scored]`."""
        rows = [row for one in self.scores for row in range(one.begin, one.begin + len(one.token_ids))]
        return np.array(rows, np.int32)

    @property
    def pooled_rows(self) -> npt.NDArray[np.int32]:
        """The rows whose hidden states are pooled, int32 `[num_pooled]`."""
        rows = [row for one in self.pooled for row in range(one.begin, one.begin + one.num_rows)]
        return np.array(rows, np.int32)


@dataclass(frozen=True, slots=True, eq=False)
class OuterSlots:
    """Adapter slots of a step's rows for the outer modules: -1 where a row's adapter lacks the module.

    `embedding` int32 `[num_tokens]`, `head` int32 `[num_samples]`.
    """

    embedding: npt.NDArray[np.int32]
    head: npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True, eq=False)
class StepInputs:
    """Inputs of a forward pass, on the device. The axes may be padded. The outputs of padding rows are arbitrary.

    `tokens`, `positions`, `slots` and `sample_rows` are int32. `slots` is the adapter slot of each row, or -1 for the
    base. `attention` has an entry for each of `CacheLayout.groups`. If `segments` is empty, no adapters are applied.
    `embedding_segments` cover the rows whose adapters modify the embedding. Without such rows, they are empty or None.
    In each layer, adapters modify only modules in `groups`. With `expands_first`, the outputs of adapters of linear
    layers are computed before the base's product, which adds to them, and no adapter has affines. In a hybrid decoder,
    `states` lists the pages of the sequences' states instead of the pages of their K and V. Otherwise, it is None.
    Drafts are rows of their sequence there. `delta_inputs` is a list to which each layer with a delta rule adds its
    input, or None if the inputs are not needed after the step.
    """

    tokens: torch.Tensor
    positions: torch.Tensor
    attention: tuple[AttentionBatch, ...]
    slots: torch.Tensor
    segments: Segments
    sample_rows: torch.Tensor
    embedding_segments: Segments | None = None
    groups: LayerGroups = ALL_GROUPS
    expands_first: bool = False
    states: AttentionBatch | None = None
    delta_inputs: list[torch.Tensor] | None = None


def _no_rows() -> Batch:
    none = np.zeros(0, np.int32)
    return Batch(
        tokens=none,
        positions=none,
        slots=none,
        cu_q=np.zeros(1, np.int32),
        seq_lens=none,
        blocks=none,
        block_starts=none[None],
        kv_slots=none.astype(np.int64)[None],
        state_starts=none,
        max_q=0,
        sample_rows=none,
        samples=(),
    )


NO_ROWS = _no_rows()
"""A step without sequences. Padded to a shape, it consists only of padding rows."""


def build_batch(scheduled: list[ScheduledSequence], block_tokens: int) -> Batch:
    """Concatenate the rows of the scheduled sequences."""
    sequences = [item.sequence for item in scheduled]
    # Use int32 arrays, because numpy uses their buffers directly but converts a list element by element.
    counts = array("i", [item.num_tokens for item in scheduled])
    begins = array("i", [sequence.num_computed for sequence in sequences])
    slots = array("i", [sequence.slot for sequence in sequences])
    tokens: list[int] = []
    sample_rows: list[int] = []
    samples: list[SamplingRow] = []
    scores: list[ScoredRows] = []
    pooled: list[PooledRows] = []
    # The rows before the activation of their sequence's adapter, as half-open ranges.
    base_rows: list[tuple[int, int]] = []
    has_drafts = False
    for item, sequence, begin, num_tokens in zip(scheduled, sequences, begins, counts, strict=True):
        known, end = sequence.tokens, begin + num_tokens
        if begin < sequence.num_prompt:
            if sequence.num_unscored:
                scores.append(_scored_rows(sequence, len(tokens), num_tokens))
            if begin < sequence.activation:
                base_rows.append((len(tokens), len(tokens) + min(num_tokens, sequence.activation - begin)))
            if sequence.is_pooled:
                pooled.append(_pooled_rows(sequence, len(tokens), num_tokens))
        if end > len(known):
            assert end == len(known) + 1, "only the newest token of a sequence can be in flight"
            tokens += known[begin:]
            tokens.append(-1 - sequence.sample_index)
        elif num_tokens == 1:
            tokens.append(known[begin])
        else:
            tokens += known[begin:end]
        if end == sequence.num_tokens and not sequence.is_pooled:
            sample_rows.append(len(tokens) - 1)
            # Copied, because later steps may change the sequence.
            num_chosen = end - sequence.num_prompt
            samples.append(SamplingRow(sequence.add.sampling, sequence.seed, num_chosen, sequence.logit_penalties))
            if item.drafts:
                has_drafts = True
                sample_rows += range(len(tokens), len(tokens) + len(item.drafts))
                samples += _draft_samples(sequence, item.drafts, num_chosen)
                tokens += item.drafts
    blocks, block_starts, state_starts = _listed_blocks(sequences)
    if has_drafts:
        entries = [(index, place) for index, item in enumerate(scheduled) for place in range(1 + len(item.drafts))]
        counts, begins, slots = _with_drafts(entries, counts, begins, slots)
        indices = [index for index, _ in entries]
        block_starts = block_starts.take(indices, axis=1)
        if len(state_starts):
            state_starts = state_starts.take(indices)
    first_positions, cu_q = np.asarray(begins), _running_sum(counts)
    positions, row_slots, row_starts = first_positions, np.asarray(slots), block_starts
    max_q = max(counts)
    # If every sequence has a single row, no gather is needed.
    if max_q > 1:
        of_row = np.repeat(np.arange(len(counts)), counts)
        positions = np.arange(len(tokens), dtype=np.int32) - (cu_q[:-1] - first_positions)[of_row]
        row_slots, row_starts = row_slots[of_row], block_starts.take(of_row, axis=1)
    for first_row, end_row in base_rows:
        row_slots[first_row:end_row] = -1
    block_of_row, place_in_block = np.divmod(positions, block_tokens)
    return Batch(
        tokens=np.asarray(array("i", tokens)),
        positions=positions,
        slots=row_slots,
        cu_q=cu_q,
        seq_lens=np.asarray(counts) + first_positions,
        blocks=blocks,
        block_starts=block_starts,
        kv_slots=np.multiply(blocks[row_starts + block_of_row], block_tokens, dtype=np.int64, order="C")
        + place_in_block,
        state_starts=state_starts,
        max_q=max_q,
        sample_rows=np.asarray(array("i", sample_rows)),
        samples=tuple(samples),
        scores=tuple(scores),
        pooled=tuple(pooled),
    )


def head_rows(scheduled: list[ScheduledSequence], is_drafting: bool) -> HeadRows:
    """`Batch.head` of a step whose tokens are all known. Call this before the step counts as computed."""
    if all(item.sequence.num_computed + 1 >= len(item.sequence.tokens) for item in scheduled):
        # The common case, a decode step: no row's next token is known.
        return HeadRows(np.zeros(sum(item.num_rows for item in scheduled), np.int32), is_drafting)
    next_tokens = array("i")
    for item in scheduled:
        begin = item.sequence.num_computed
        known = item.sequence.tokens[begin + 1 : begin + 1 + item.num_tokens]
        next_tokens.extend(known)
        next_tokens.extend([0] * (item.num_rows - len(known)))
    return HeadRows(np.asarray(next_tokens), is_drafting)


def _draft_samples(sequence: Sequence, drafts: tuple[int, ...], num_chosen: int) -> Iterator[SamplingRow]:
    """What is sampled after each draft, as if the drafts up to there were committed.

    `num_chosen` is the number of new tokens before the drafts.
    """
    penalties = sequence.logit_penalties
    for count in range(1, len(drafts) + 1):
        own = None if penalties is None else penalties.after(drafts[:count])
        yield SamplingRow(sequence.add.sampling, sequence.seed, num_chosen + count, own)


def _with_drafts(
    entries: list[tuple[int, int]], counts: array[int], begins: array[int], slots: array[int]
) -> tuple[array[int], array[int], array[int]]:
    """Repeat the entries of each sequence for its drafts, which begin one position later each. `entries` are pairs of
    a sequence's index and a number of positions.
    """
    indices = [index for index, _ in entries]
    return (
        array("i", [counts[index] for index in indices]),
        array("i", [begins[index] + place for index, place in entries]),
        array("i", [slots[index] for index in indices]),
    )


def _listed_blocks(
    sequences: list[Sequence],
) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32], npt.NDArray[np.int32]]:
    """All blocks of the sequences, group by group, followed by the pages of their states.

    Also returns the index at which each sequence's block 0 would be in each group if no block had been freed, and the
    index of each sequence's first state page.
    """
    blocks = array("i")
    starts: list[int] = []
    num_groups = len(sequences[0].tables)
    for group in range(num_groups):
        for table in [sequence.tables[group] for sequence in sequences]:
            starts.append(len(blocks) - table.first_block)
            blocks += table.blocks
    block_starts = np.asarray(array("i", starts)).reshape(num_groups, -1)
    if not sequences[0].state_pages:
        return np.asarray(blocks), block_starts, NO_ROWS.state_starts
    state_starts = array("i")
    for sequence in sequences:
        state_starts.append(len(blocks))
        blocks += sequence.state_pages
    return np.asarray(blocks), block_starts, np.asarray(state_starts)


def _scored_rows(sequence: Sequence, first_row: int, num_tokens: int) -> ScoredRows:
    """The rows to score among the sequence's next `num_tokens`, which start at `first_row` of the step."""
    begin = max(sequence.num_computed, sequence.num_prompt - 1 - sequence.num_unscored)
    end = min(sequence.num_computed + num_tokens, sequence.num_prompt - 1)
    token_ids = tuple(sequence.tokens[begin + 1 : end + 1]) if begin < end else ()
    count = sequence.add.sampling.num_prompt_logprobs or 0
    return ScoredRows(first_row + begin - sequence.num_computed, token_ids, count)


def _pooled_rows(sequence: Sequence, first_row: int, num_tokens: int) -> PooledRows:
    """The rows to pool among the sequence's next `num_tokens`, which start at `first_row` of the step.

    Rows that a preempted sequence computes again are not pooled again.
    """
    first, last = sequence.pooled_range
    end_of_step = sequence.num_computed + num_tokens
    begin = max(first, sequence.num_computed, sequence.num_reached)
    num_rows = max(0, min(last, end_of_step) - begin)
    is_last = end_of_step == sequence.num_prompt
    return PooledRows(first_row + begin - sequence.num_computed, num_rows, is_last, sequence.add.num_labels)


def _running_sum(counts: array[int]) -> npt.NDArray[np.int32]:
    """`[0, counts[0], counts[0] + counts[1], ...]`."""
    return np.asarray(array("i", [*accumulate(counts, initial=0)]))
