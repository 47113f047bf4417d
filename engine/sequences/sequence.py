"""One request inside the engine."""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum

import numpy as np
import numpy.typing as npt

from loramux.engine.constraints.grammar import Grammar
from loramux.engine.constraints.logit_penalties import LogitPenalties, logit_penalties
from loramux.engine.constraints.token_rules import TokenRules
from loramux.engine.protocol.messages import Add, TokenLogprobs
from loramux.engine.protocol.service_tiers import rank_of
from loramux.engine.sequences.cached_page import CachedPage
from loramux.engine.sequences.disk_wait import DiskWait

ShareKey = tuple[str, int]
"""A share key, and the rank of the share's sequences: see `rank_of`."""


class SequenceState(Enum):
    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


def block_list(blocks: Iterable[int] = ()) -> array[int]:
    """Block numbers as an int32 array, which a batch copies without converting each element."""
    return array("i", blocks)


@dataclass(slots=True, eq=False)
class PageTable:
    """A sequence's pages in one group of layers, and their blocks: see `CacheLayout.blocks`."""

    blocks: array[int] = field(default_factory=block_list)
    first_block: int = 0
    """Index of `blocks[0]` among all blocks of the sequence. It is above 0 once windowed layers have freed earlier
    pages.
    """
    cached: list[CachedPage | None] = field(default_factory=list)
    """Prefix-cache entries of the first pages. An entry is None if another cached page has the same content."""

    @property
    def end_block(self) -> int:
        return self.first_block + len(self.blocks)


@dataclass(slots=True, eq=False)
class Sequence:
    """A prompt, the tokens generated so far, and the pages that hold their K and V.

    `tokens` are the prompt and the committed tokens. Steps in flight choose `num_in_flight` more tokens, which
    `num_tokens` includes. The K and V of positions `[0, num_computed)` are in `tables`, or will be once the steps in
    flight finish. Windowed layers keep only positions that later positions see. A token's K and V are computed one step
    after the token is chosen. A preemption resets `num_computed` to 0, so that all K and V are computed again.
    """

    add: Add
    owner: bytes
    """The gateway that submitted the sequence and receives its output."""
    arrival: int
    """Order of arrival. Among sequences of a share with the same priority, the youngest is preempted first."""
    seed: int
    stop_token_ids: frozenset[int] = frozenset()
    """Tokens that end the sequence, including the model's own end tokens."""
    stop_token_id: int | None = None
    """The token in `stop_token_ids` that ended the sequence."""
    stop_logprobs: TokenLogprobs | None = None
    """Log-probabilities of `stop_token_id`, if requested."""
    state: SequenceState = SequenceState.WAITING
    slot: int = -1
    """The adapter's slot while the sequence is running, or -1 for the base. Rows before `activation` do not use it."""
    has_run: bool = False
    """True if the sequence has been in a step. A sequence that never ran is not billed."""
    pays_again: bool = False
    """True if the share pays for tokens that are computed again, because the sequence was stalled when preempted."""
    num_computed: int = 0
    tables: list[PageTable] = field(default_factory=lambda: [PageTable()])
    """The sequence's pages, for each of `CacheLayout.groups`."""
    num_room: int = 0
    """Capacity of `tables`, in tokens."""
    state_pages: array[int] = field(default_factory=block_list)
    """The pages of a hybrid decoder's state after the first `num_computed` tokens. Their number does not depend on the
    sequence's length. The first step ignores their contents unless the sequence starts with a cached prefix."""
    saved_state: array[int] = field(default_factory=block_list)
    """Pages with a copy of a hybrid decoder's state before the step in flight. Empty unless that step has drafts of the
    sequence.
    """
    num_drafted: int = 0
    """Number of rows for drafts in the sequence's last step."""
    checkpoints: list[int] = field(default_factory=list)
    """The positions, in ascending order, at which steps must end because a checkpoint of the state is wanted there: see
    `StateCheckpoints`. Empty unless the decoder is hybrid.
    """
    used_checkpoints: list[bytes] = field(default_factory=list)
    """The keys of the checkpoints that the running sequence started from or left, by position."""
    next_offer: int = 0
    """Number of tokens that must be computed and committed before another page can be cached or freed: see
    `KvPages.offer`.
    """
    tokens: list[int] = field(default_factory=list)
    pending_output: list[int] = field(default_factory=list)
    """Committed tokens not yet emitted to the gateway: see `Add.tokens_at_once`."""
    num_in_flight: int = 0
    num_tokens: int = 0
    sample_index: int = -1
    """Index of this sequence's token in the output of the step in flight. Valid only while a step is in flight."""
    page_keys: list[bytes] = field(default_factory=list)
    """Keys of the sequence's first full blocks, computed when needed and kept after the pages are freed."""
    num_cached: int = 0
    """Number of prompt tokens found in the prefix cache when the sequence first ran."""
    has_waited_for_prefix: bool = False
    """True if the sequence has begun a step later, because other sequences were computing the start of its prompt."""
    disk_wait: DiskWait | None = None
    """The cached pages on disk that the waiting sequence needs, or needed. None if it has not looked for any yet."""
    awaits_disk: bool = False
    """True while it gets no turn because of them."""
    num_reached: int = 0
    """Highest `num_computed` so far. Tokens before this position that run again count as recomputed."""
    num_adapter_pages: int = 0
    """The adapter's page count, set when the sequence first runs and kept after the adapter is evicted."""
    num_wanted: int = 0
    """Limit requested before the adapter's size was known, applied when the sequence first runs. 0 if there is none."""
    num_predicted: int = 0
    """Number of drafted tokens of `Add.prediction` that steps have verified."""
    num_predicted_right: int = 0
    """Number of these tokens that were accepted."""
    is_tainted: bool = False
    """True if the sequence's K and V may be non-finite. They must then not enter the prefix cache."""
    is_paused: bool = False
    """True if the sequence has reached its limit and is waiting for a higher limit."""
    row_place: tuple[int, int] = (-1, 0)
    """Sort key of the sequence's rows in a step: slot, then arrival, so that rows of the same adapter are adjacent."""
    logit_penalties: LogitPenalties | None = None
    """The requested bias and penalties. None for most sequences."""
    grammar: Grammar | None = None
    """The grammar for new tokens. The sequence waits until the grammar is compiled. None for most sequences."""
    token_rules: TokenRules | None = None
    """The request's other rules for new tokens, such as bad words. None for most sequences."""
    # Stored rather than computed, because each step reads these values several times per sequence.
    share_key: ShareKey = field(init=False)
    rank: int = field(init=False)
    """Place in the order of preemption: see `rank_of`."""
    is_background: bool = field(init=False)
    """True if the sequence yields to others: see `Add.is_background`. False once its share has waited too long."""
    num_prompt: int = field(init=False)
    activation: int = field(init=False)
    """Position of the first token that the adapter modifies: see `Add.activation`."""
    num_reserved: int = field(init=False)
    """Limit in tokens, including the prompt. It comes from `Add.max_tokens`, and `TokenGrants` can raise it."""
    num_unscored: int = field(init=False)
    """Number of prompt tokens that no submitted step has scored yet. 0 if prompt log-probabilities are not requested. A
    preemption does not change it.
    """
    is_pooled: bool = field(init=False)
    """True if the sequence returns its prompt's pooled hidden state and generates no tokens: see `Add.pooling`."""
    pooled_sum: npt.NDArray[np.float64] | None = None
    """Sum of the hidden states that committed steps have pooled."""

    def __post_init__(self) -> None:
        self.tokens = list(self.add.prompt)
        self.num_tokens = self.num_prompt = len(self.tokens)
        self.activation = self.add.activation
        self.rank = rank_of(self.add.service_tier, self.add.is_background)
        self.share_key = self.add.share_key, self.rank
        self.is_background = self.add.is_background
        self.is_pooled = self.add.pooling is not None
        # The limit of a pooled sequence is reached once its last step is in flight: see `choose`.
        self.num_reserved = self.num_prompt + (1 if self.is_pooled else self.add.max_tokens)
        # The first token has no prediction.
        self.num_unscored = 0 if self.add.sampling.num_prompt_logprobs is None else self.num_prompt - 1
        self.logit_penalties = logit_penalties(self.add.sampling, self.tokens, self.num_prompt)

    def end_background(self) -> None:
        """No longer yield to others than the sequence's tier does. The sequence keeps its share."""
        self.is_background = False
        self.rank = rank_of(self.add.service_tier, is_background=False)

    def choose(self, sample_index: int) -> None:
        """Record that the step just submitted chooses the next token, at index `sample_index`.

        A pooled sequence chooses no token, but its last step counts like one until it is committed.
        """
        self.num_in_flight += 1
        self.num_tokens += 1
        self.sample_index = sample_index

    def commit(self, token_id: int | None) -> None:
        """Commit the token chosen by the oldest step in flight, or None if the logits were not finite."""
        self.num_in_flight -= 1
        if token_id is None:
            self.num_tokens -= 1
        else:
            self.tokens.append(token_id)
            if self.grammar is not None:
                self.grammar.accept(token_id)

    def accept(self, token_id: int) -> None:
        """Commit a further token of the step just committed, which also computed the K and V of the token before it.

        That token was drafted, and was chosen in its place.
        """
        self.tokens.append(token_id)
        self.num_tokens += 1
        self.num_computed += 1
        self.num_reached = max(self.num_reached, self.num_computed)
        if self.grammar is not None:
            self.grammar.accept(token_id)

    def take_back(self) -> None:
        """Undo `choose` for the step just submitted, which then chooses no token for this sequence."""
        self.num_in_flight -= 1
        self.num_tokens -= 1

    def emit(self, token_id: int, is_urgent: bool) -> tuple[int, ...]:
        """Add a committed token to the output and return the tokens to emit now, if any."""
        self.pending_output.append(token_id)
        if not is_urgent and self.num_completion > 1 and len(self.pending_output) < self.add.tokens_at_once:
            return ()
        return self.take_pending_output()

    def take_pending_output(self) -> tuple[int, ...]:
        emitted = tuple(self.pending_output)
        self.pending_output.clear()
        return emitted

    @property
    def sequence_id(self) -> str:
        return self.add.sequence_id

    @property
    def num_completion(self) -> int:
        """Number of committed new tokens."""
        return len(self.tokens) - self.num_prompt

    @property
    def pooled_range(self) -> tuple[int, int]:
        """The half-open range of prompt positions whose hidden states a pooled sequence returns the mean of."""
        match self.add.pooling:
            case "last":
                return self.num_prompt - 1, self.num_prompt
            case "cls":
                return 0, 1
            case _:
                return 0, self.num_prompt

    @property
    def shares_prefixes(self) -> bool:
        """True if the sequence uses and fills the prefix cache."""
        return bool(self.add.isolation_key) and not self.is_pooled

    @property
    def is_running(self) -> bool:
        return self.state is SequenceState.RUNNING

    @property
    def is_constrained(self) -> bool:
        """True if a grammar or a rule restricts the sequence's tokens."""
        return self.grammar is not None or self.token_rules is not None

    @property
    def has_mask(self) -> bool:
        """True unless the mask after the last committed token is still being computed."""
        return self.grammar is None or self.grammar.is_ready

    @property
    def waits_for_mask(self) -> bool:
        """True if the next step should not include the sequence, because it may not have a mask in time.

        The mask after a token in flight is requested once the token is committed.
        """
        if self.grammar is None:
            return False
        return not (self.grammar.is_awaited if self.num_in_flight else self.grammar.is_ready)

    @property
    def is_stalled(self) -> bool:
        """True if the sequence waits for the mask after its last token, and its tenant has used too much processor time
        to get it soon.
        """
        return not self.num_in_flight and not self.has_mask and self.grammar is not None and self.grammar.is_throttled

    @property
    def held_back(self) -> frozenset[int]:
        """The tokens that would end the sequence before its `min_tokens`."""
        return self.held_back_after(0)

    def held_back_after(self, num_drafts: int) -> frozenset[int]:
        """`held_back` if `num_drafts` more tokens were committed."""
        is_short = self.num_completion + num_drafts < self.add.sampling.min_tokens
        return self.stop_token_ids if is_short else frozenset()

    @property
    def num_chosen(self) -> int:
        """Number of new tokens, committed or in flight."""
        return self.num_tokens - self.num_prompt

    @property
    def num_pending(self) -> int:
        """Number of tokens whose K and V have not been computed yet. It is 1 during steady-state decoding."""
        return self.num_tokens - self.num_computed

    @property
    def num_computable(self) -> int:
        """Number of tokens that the next step can compute: `num_pending`, or those before the next checkpoint."""
        return self.checkpoints[0] - self.num_computed if self.checkpoints else self.num_pending

    @property
    def num_paged(self) -> int:
        """Number of tokens that need pages by the time the sequence reaches its limit. A pooled sequence's limit is one
        token beyond its prompt, which it never computes.
        """
        return self.num_prompt if self.is_pooled else self.num_reserved

    @property
    def has_reached_limit(self) -> bool:
        """True if the last token within the limit is in flight or committed, so no further step can include the
        sequence.
        """
        return self.num_tokens >= self.num_reserved
