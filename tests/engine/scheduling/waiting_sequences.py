"""Sequences that wait in a fair queue, and the admission of the next."""

from __future__ import annotations

from loramux.engine.messages import Add
from loramux.engine.scheduling.fair_queue import FairQueue
from loramux.engine.sequence import Sequence
from tests.engine.simulated_engine import GREEDY


def waiting(queue: FairQueue, arrival: int, share: str = "", num_prompt: int = 10, **fields: object) -> Sequence:
    add = Add(
        sequence_id=str(arrival), prompt=(0,) * num_prompt, max_tokens=10, sampling=GREEDY, share_key=share, **fields
    )
    sequence = Sequence(add=add, owner=b"", arrival=arrival, seed=0)
    queue.add(sequence)
    return sequence


def admit_next(queue: FairQueue) -> Sequence:
    (sequence,) = queue.order(1, 0)
    queue.admit(sequence, sequence.num_tokens)
    return sequence
