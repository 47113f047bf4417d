"""The time to the first token does not tell a tenant which prompts another tenant has sent."""

from __future__ import annotations

import os
import random
import time
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest

from loramux.engine.protocol.messages import Add
from tests.conformance.parity import Subject
from tests.reliability.record import recorded
from tests.reliability.side_channel import area_under_curve
from tests.reliability.tiny_engine import GREEDY, TinyEngine, draw_tokens, make_tiny

NUM_PAIRS = int(os.environ.get("LORAMUX_SIDE_CHANNEL_PAIRS", "10000"))
PROMPT_LEN = 160
VICTIM, ATTACKER = b"victim", b"attacker"


@dataclass(slots=True)
class Probes:
    """What one tenant measures: the times of prompts that the victim has sent, and of prompts that nobody has sent."""

    known_s: list[float] = field(default_factory=list)
    new_s: list[float] = field(default_factory=list)
    num_cached: int = 0
    """Tokens of known prompts that were found in the prefix cache."""

    @property
    def auc(self) -> float:
        return area_under_curve(self.known_s, self.new_s)


class Probing:
    def __init__(self, engine: TinyEngine) -> None:
        self._engine = engine
        self._num_sent = 0

    def first_token(self, prompt: tuple[int, ...], tenant: bytes) -> tuple[float, int]:
        """Send a prompt. Return the seconds until its first token, and the number of cached tokens."""
        self._num_sent += 1
        sequence_id = str(self._num_sent)
        add = Add(
            sequence_id=sequence_id,
            prompt=prompt,
            max_tokens=1,
            sampling=GREEDY,
            isolation_key=tenant,
            share_key=tenant.decode(),
        )
        started_s = time.perf_counter()
        self._engine.add(add)
        while not self._engine.tokens[sequence_id]:
            self._engine.step()
        took_s = time.perf_counter() - started_s
        self._engine.finish()
        return took_s, self._engine.ends.pop(sequence_id).cached_tokens


def probe(subject: Subject, num_pairs: int, seed: int) -> dict[bytes, Probes]:
    """For each pair, the victim sends a prompt. Then both tenants send that prompt and a new one, in random order."""
    dice = random.Random(seed)
    found = {VICTIM: Probes(), ATTACKER: Probes()}
    # Few tokens fit into a step, so that a prompt that is not cached takes many steps.
    with closing(TinyEngine(subject, {}, max_batch_tokens=32)) as engine:
        probing = Probing(engine)
        for _ in range(num_pairs):
            known = draw_tokens(dice, PROMPT_LEN)
            probing.first_token(known, VICTIM)
            sent = [(tenant, is_known) for tenant in found for is_known in (True, False)]
            dice.shuffle(sent)
            for tenant, is_known in sent:
                took_s, num_cached = probing.first_token(known if is_known else draw_tokens(dice, PROMPT_LEN), tenant)
                (found[tenant].known_s if is_known else found[tenant].new_s).append(took_s)
                found[tenant].num_cached += num_cached
    return found


@pytest.mark.parametrize("num_pairs", [8, pytest.param(NUM_PAIRS, marks=pytest.mark.campaign)], ids=["few", "many"])
def test_only_the_tenant_itself_finds_its_prompts_in_the_cache(num_pairs: int, tmp_path: Path) -> None:
    """`make reliability` judges the times. A test that does so would fail on a busy machine."""
    found = probe(make_tiny(tmp_path), num_pairs, seed=num_pairs)
    with recorded(
        "side-channels", pairs=num_pairs, other_tenant_auc=found[ATTACKER].auc, same_tenant_auc=found[VICTIM].auc
    ):
        assert found[ATTACKER].num_cached == 0
        assert found[VICTIM].num_cached >= num_pairs * PROMPT_LEN / 2


def test_equal_distributions_cannot_be_told_apart() -> None:
    generator = np.random.default_rng(1)
    first, second = generator.lognormal(size=(2, 20_000))
    assert area_under_curve(first.tolist(), second.tolist()) == pytest.approx(0.5, abs=0.01)
    assert area_under_curve([1.0, 1.0], [1.0]) == 0.5


def test_shifted_distributions_are_told_apart_as_far_as_they_differ() -> None:
    generator = np.random.default_rng(1)
    first, second = generator.normal(size=(2, 20_000))
    # The difference of two standard normal variables has the standard deviation 2 ** 0.5.
    assert area_under_curve(first.tolist(), (second + 2**0.5).tolist()) == pytest.approx(0.8413, abs=0.01)
    assert area_under_curve([1.0, 2.0], [3.0, 4.0]) == 1.0
    assert area_under_curve([3.0, 4.0], [1.0, 2.0]) == 0.0
    with pytest.raises(ValueError, match="both sets"):
        area_under_curve([], [1.0])
