"""One request inside the engine."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from loramux.engine.messages import Add, TokenLogprobs


class SequenceState(Enum):
    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(slots=True, eq=False)
class Sequence:
    """A prompt, the tokens generated so far, and the pages that hold their K and V.

    Positions `[0, num_computed)` are in `pages`. `num_tokens` counts prompt and committed tokens; the last committed
    one has no K and V until the next step. After a preemption `num_computed` is 0 and all of them are computed again.
    """

    add: Add
    owner: bytes
    """The gateway that asked; outputs go back to it."""
    arrival: int
    """Order of arrival; the youngest is preempted first."""
    seed: int
    state: SequenceState = SequenceState.WAITING
    slot: int = -1
    """The adapter's slot while running, -1 for the base."""
    has_run: bool = False
    """A step has held it; what never ran costs nothing."""
    num_computed: int = 0
    pages: list[int] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.tokens = list(self.add.prompt)

    @property
    def sequence_id(self) -> str:
        return self.add.sequence_id

    @property
    def num_prompt(self) -> int:
        return len(self.add.prompt)

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    @property
    def num_completion(self) -> int:
        return len(self.tokens) - len(self.add.prompt)

    @property
    def num_pending(self) -> int:
        """Tokens whose K and V are still to be computed; 1 in steady decode."""
        return len(self.tokens) - self.num_computed
