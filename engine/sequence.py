"""One request inside the engine."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from enum import Enum

from loramux.engine.cached_page import CachedPage
from loramux.engine.logit_penalties import LogitPenalties, logit_penalties
from loramux.engine.messages import Add


class SequenceState(Enum):
    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


def page_list(pages: list[int] | None = None) -> array[int]:
    """Page ids as int32, so that a batch copies them without looking at each."""
    return array("i", pages or [])


@dataclass(slots=True, eq=False)
class Sequence:
    """A prompt, the tokens generated so far, and the pages that hold their K and V.

    `tokens` are the prompt and the committed tokens; `num_in_flight` more were chosen by steps whose results nobody
    has looked at yet, and `num_tokens` counts them all. The K and V of positions `[0, num_computed)` are in `pages`,
    or will be once the steps in flight are through; those of the newest token are computed by the step after the one
    that chose it. After a preemption `num_computed` is 0 and all of them are computed again.
    """

    add: Add
    owner: bytes
    """The gateway that asked; outputs go back to it."""
    arrival: int
    """Order of arrival; the youngest is preempted first."""
    seed: int
    stop_token_ids: frozenset[int] = frozenset()
    """Those that end it, the model's own included."""
    state: SequenceState = SequenceState.WAITING
    slot: int = -1
    """The adapter's slot while running, -1 for the base."""
    has_run: bool = False
    """A step has held it; what never ran costs nothing."""
    num_computed: int = 0
    pages: array[int] = field(default_factory=page_list)
    num_room: int = 0
    """Tokens that `pages` hold."""
    next_offer: int = 0
    """With so many tokens computed it may have filled a page that the prefix cache does not know."""
    tokens: list[int] = field(default_factory=list)
    pending_output: list[int] = field(default_factory=list)
    """Committed tokens that are emitted to its gateway later: see `Add.tokens_at_once`."""
    num_in_flight: int = 0
    num_tokens: int = 0
    sample_index: int = -1
    """Which token of the step in flight is this sequence's, while there is one."""
    page_keys: list[bytes] = field(default_factory=list)
    """Keys of its first full pages, as far as they were needed; they outlive the pages."""
    shared_pages: list[CachedPage | None] = field(default_factory=list)
    """What the prefix cache knows of `pages[:len(shared_pages)]`; None where it holds the same in another page."""
    num_cached: int = 0
    """Prompt tokens that the prefix cache had when the sequence first ran."""
    num_reached: int = 0
    """The most that `num_computed` ever was: tokens below it that a step holds are computed again."""
    num_adapter_pages: int = 0
    """Of its adapter, from when it first runs; they are counted also while the adapter is away."""
    num_wanted: int = 0
    """What `num_reserved` was to become, where that was asked before the size of its adapter was known."""
    is_tainted: bool = False
    """What it computed may be broken, and is offered to nobody."""
    is_paused: bool = False
    """It waits, at its limit, for a higher one."""
    row_place: tuple[int, int] = (-1, 0)
    """Its place in a step while running: slot and arrival, so that the rows of one adapter are side by side."""
    logit_penalties: LogitPenalties | None = None
    """What its settings have done to the logits; None for most."""
    # Looked at several times a step for each sequence, so they are kept instead of computed.
    num_prompt: int = field(init=False)
    num_reserved: int = field(init=False)
    """Its limit: the most tokens that it can come to, at first by `Add.max_tokens`. `TokenGrants` raises it."""

    def __post_init__(self) -> None:
        self.tokens = list(self.add.prompt)
        self.num_tokens = self.num_prompt = len(self.tokens)
        self.num_reserved = self.num_prompt + self.add.max_tokens
        self.logit_penalties = logit_penalties(self.add.sampling, self.tokens, self.num_prompt)

    def choose(self, sample_index: int) -> None:
        """The step that was submitted just now chooses the next token, as its `sample_index`-th."""
        self.num_in_flight += 1
        self.num_tokens += 1
        self.sample_index = sample_index

    def commit(self, token_id: int | None) -> None:
        """What the oldest step in flight has chosen; None where that was no token."""
        self.num_in_flight -= 1
        if token_id is None:
            self.num_tokens -= 1
        else:
            self.tokens.append(token_id)

    def emit(self, token_id: int, is_urgent: bool) -> tuple[int, ...]:
        """The tokens to emit now that this one is committed; none while more of them are waited for."""
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
        """Committed new tokens: what is billed."""
        return len(self.tokens) - self.num_prompt

    @property
    def num_chosen(self) -> int:
        """New tokens, committed or in flight."""
        return self.num_tokens - self.num_prompt

    @property
    def num_pending(self) -> int:
        """Tokens whose K and V are still to be computed; 1 in steady decode."""
        return self.num_tokens - self.num_computed

    @property
    def is_chosen_out(self) -> bool:
        """Whether its last token is in flight or committed, so that no further step may hold it."""
        return self.num_tokens >= self.num_reserved
