"""Requests beside hostile adapters get exactly the tokens that they get alone."""

from __future__ import annotations

import os
import random
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import pytest

from loramux.engine.protocol.messages import Add
from tests.conformance.parity import Subject
from tests.reliability.record import recorded
from tests.reliability.tiny_engine import (
    ADAPTERS,
    GREEDY,
    HOSTILE,
    TinyEngine,
    damaged,
    draw_tokens,
    make_tiny,
    pool_bytes,
)

NUM_REQUESTS = int(os.environ.get("LORAMUX_ISOLATION_REQUESTS", "10000"))
NUM_TENANTS = 3
NUM_OPEN = 8
"""Requests that run or wait at the same time."""
MAX_STRIKES = 3
"""Runs of a hostile adapter before the engine refuses it. The next hostile request then has another digest."""


@dataclass(frozen=True, slots=True)
class Outcome:
    num_changed: int
    num_hostile: int
    num_not_finite: int
    """Hostile sequences that the engine ended because their logits were not finite."""


def request(dice: random.Random, number: int, subject: Subject, prefixes: list[tuple[int, ...]]) -> Add:
    name = dice.choice([None, *ADAPTERS])
    # Half of the prompts continue the tenant's prefix, whose pages may be in the prefix cache.
    tenant = dice.randrange(NUM_TENANTS)
    start = prefixes[tenant] if dice.random() < 0.5 else ()
    return Add(
        sequence_id=str(number),
        prompt=start + draw_tokens(dice, dice.randint(1, 30)),
        max_tokens=dice.randint(4, 12),
        sampling=GREEDY,
        digest=None if name is None else subject.digests[name],
        isolation_key=f"tenant {tenant}".encode(),
        share_key=f"tenant {tenant}",
    )


def compare(subject: Subject, num_requests: int, seed: int) -> Outcome:
    """Run each request beside a hostile one in a pool that is too small, and then again alone."""
    dice = random.Random(seed)
    prefixes = [draw_tokens(dice, 40) for _ in range(NUM_TENANTS)]
    requests = [request(dice, number, subject, prefixes) for number in range(num_requests)]
    plain = list(subject.adapters.values())
    kinds = list(HOSTILE)
    hostile = [
        damaged(dice.choice(plain), kinds[number % len(kinds)], number) for number in range(num_requests // MAX_STRIKES)
    ]
    adapters = subject.adapters | {one.digest: one for one in hostile}
    # Adapters and prefixes evict each other, so that pages that held hostile values are used again.
    settings = {"pool_bytes": pool_bytes(subject, 20), "max_resident_adapters": 3}
    with closing(TinyEngine(subject, adapters, **settings)) as mixed:
        for number, add in enumerate(requests):
            mixed.add(
                Add(
                    sequence_id=f"hostile {number}",
                    prompt=draw_tokens(dice, dice.randint(1, 30)),
                    max_tokens=dice.randint(1, 12),
                    sampling=GREEDY,
                    digest=hostile[number % len(hostile)].digest,
                    isolation_key=b"hostile",
                    share_key="hostile",
                )
            )
            mixed.add(add)
            while 2 * (number + 1) - len(mixed.ends) >= NUM_OPEN:
                mixed.step()
        mixed.finish()
        mixed.engine.check_integrity()
        with closing(TinyEngine(subject, subject.adapters)) as alone:
            num_changed = 0
            for add in requests:
                alone.add(add)
                alone.finish()
                same = mixed.tokens[add.sequence_id] == alone.tokens[add.sequence_id]
                num_changed += not (same and mixed.ends[add.sequence_id].reason == "length")
        ends = [end for sequence_id, end in mixed.ends.items() if not sequence_id.isdigit()]
    return Outcome(num_changed, len(ends), sum(end.code == "not_finite" for end in ends))


@pytest.mark.parametrize(
    "num_requests", [24, pytest.param(NUM_REQUESTS, marks=pytest.mark.campaign)], ids=["few", "many"]
)
def test_hostile_adapters_change_no_token_of_other_requests(num_requests: int, tmp_path: Path) -> None:
    outcome = compare(make_tiny(tmp_path), num_requests, seed=num_requests)
    with recorded(
        "isolation", requests=num_requests, hostile=outcome.num_hostile, changed=outcome.num_changed, seed=num_requests
    ):
        assert outcome.num_changed == 0
        assert outcome.num_hostile == num_requests
        assert outcome.num_not_finite > num_requests / 8, "the hostile adapters ran"
