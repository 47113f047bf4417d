from __future__ import annotations

from collections.abc import Callable, Collection

from loramux.engine.protocol.messages import Add
from tests.engine.simulated_engine import VOCAB_SIZE, Simulation


def expected_tokens(simulation: Simulation, add: Add, forbidden: Callable[[list[int]], Collection[int]]) -> list[int]:
    """The greedy answer of the simulated model. `forbidden` returns the tokens that must not follow an answer."""
    answer: list[int] = []
    while len(answer) < add.max_tokens:
        refused = set(forbidden(answer))
        [likeliest] = simulation.executor.generate((*add.prompt, *answer), 1, add.digest)
        # All other tokens have the same logit, and the first of them is chosen.
        following = likeliest if likeliest not in refused else next(i for i in range(VOCAB_SIZE) if i not in refused)
        answer.append(following)
    return answer
