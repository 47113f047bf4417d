"""An engine whose requests are aborted at random moments frees their pages at once."""

from __future__ import annotations

import os
import random
import time
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import pytest

from loramux.engine.protocol.messages import Add
from tests.conformance.parity import Subject
from tests.reliability.record import recorded
from tests.reliability.tiny_engine import ADAPTERS, GREEDY, TinyEngine, draw_tokens, make_tiny, pool_bytes

NUM_DISCONNECTS = int(os.environ.get("LORAMUX_DISCONNECTS", "2000"))
NUM_OPEN = 8
"""Requests that run or wait at the same time."""


@dataclass(frozen=True, slots=True)
class Outcome:
    num_aborted: int
    num_leaked_pages: int
    slowest_ms: float
    """Longest time from an abort until the sequence had ended and its pages were free."""


def disconnect(subject: Subject, num_disconnects: int, seed: int) -> Outcome:
    dice = random.Random(seed)
    slowest_s = 0.0
    with closing(TinyEngine(subject, subject.adapters, pool_bytes=pool_bytes(subject, 24))) as engine:
        running: list[str] = []
        for number in range(num_disconnects):
            while len(running) < NUM_OPEN:
                running.append(f"{number} {len(running)}")
                name = dice.choice([None, *ADAPTERS])
                engine.add(
                    Add(
                        sequence_id=running[-1],
                        prompt=draw_tokens(dice, dice.randint(1, 60)),
                        max_tokens=60,
                        sampling=GREEDY,
                        digest=None if name is None else subject.digests[name],
                        isolation_key=dice.choice([b"", b"x", b"y"]),
                    )
                )
            for _ in range(dice.randint(0, 5)):
                engine.step()
            victim = running.pop(dice.randrange(len(running)))
            running = [one for one in running if one not in engine.ends]
            started_s = time.perf_counter()
            engine.abort(victim)
            while victim not in engine.ends:
                engine.step()
            slowest_s = max(slowest_s, time.perf_counter() - started_s)
        for sequence_id in running:
            engine.abort(sequence_id)
        engine.finish()
        engine.engine.check_integrity()
        num_aborted = sum(end.reason == "abort" for end in engine.ends.values())
        return Outcome(num_aborted, engine.num_unowned_pages(), slowest_s * 1e3)


@pytest.mark.parametrize("number", [20, pytest.param(NUM_DISCONNECTS, marks=pytest.mark.campaign)], ids=["few", "many"])
def test_aborted_requests_leave_no_page(number: int, tmp_path: Path) -> None:
    """`make reliability` judges the time. A test that does so would fail on a busy machine."""
    outcome = disconnect(make_tiny(tmp_path), number, seed=number)
    with recorded(
        "disconnects",
        disconnects=outcome.num_aborted,
        leaked_pages=outcome.num_leaked_pages,
        slowest_ms=round(outcome.slowest_ms, 1),
    ):
        assert outcome.num_aborted >= number / 2
        assert outcome.num_leaked_pages == 0
