"""What the engine asks of its staging process, and what it finds in host memory by itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from loramux.adapter_store.formats.pack_target import PackTarget
from loramux.adapter_store.formats.packing import PackedAdapter
from loramux.adapter_store.tiers.host_store import HostStore
from loramux.adapter_store.tiers.staging import NotStaged, StagedAdapter
from loramux.adapter_store.tiers.tier_figures import TierFigures
from loramux.engine.adapters.staged_fetching import StagedFetcher
from loramux.kernels.layout import LinearShape, PageGeometry

TARGET = PackTarget((LinearShape("q", 64, 64),), PageGeometry(1, 1, 16, 4, 4), "float32")


def packed(digest: str) -> PackedAdapter:
    layout = TARGET.layout(np.array([[1]], np.int32))
    shape = (layout.num_pages, 1, TARGET.geometry.page_bytes)
    return PackedAdapter(digest, layout, np.ones((1, 1), np.float32), np.zeros(shape, np.uint8))


SIZE = packed("").payload.nbytes


class Staging:
    """Answers when the test says so."""

    def __init__(self) -> None:
        self.asked: dict[int, str] = {}
        self.cancelled: list[int] = []
        self.contents = None
        self.answers: list[StagedAdapter | NotStaged] = []
        self.is_down = False
        self.is_closed = False

    def stage(self, digest: str) -> int:
        number = len(self.asked)
        self.asked[number] = digest
        if self.is_down:
            self.fail(number)
        return number

    def cancel(self, number: int) -> None:
        self.cancelled.append(number)
        self.answers = [one for one in self.answers if one.number != number]

    @property
    def has_outcomes(self) -> bool:
        return bool(self.answers)

    def outcomes(self) -> list[StagedAdapter | NotStaged]:
        found, self.answers = self.answers, []
        return found

    def close(self) -> None:
        self.is_closed = True

    def come(self, number: int) -> None:
        self.answers.append(StagedAdapter(number, packed(self.asked[number])))

    def fail(self, number: int) -> None:
        self.answers.append(NotStaged(number, self.asked[number], "it is gone"))


class Bench:
    def __init__(self, num_kept: int = 8, num_at_once: int = 2) -> None:
        self.staging = Staging()
        self.figures = TierFigures()
        self.host = HostStore(num_kept * SIZE, self.figures)
        self.num_wakes = 0
        staging: Any = self.staging
        self.fetcher = StagedFetcher(staging, self.host, num_at_once, self._wake)

    def _wake(self) -> None:
        self.num_wakes += 1

    def bring(self, digest: str) -> None:
        """Have it in host memory, where nobody holds it."""
        self.fetcher.fetch(digest)
        self.staging.come(max(self.staging.asked))
        (outcome,) = self.fetcher.outcomes()
        assert outcome.lease is not None
        assert outcome.lease.packed.digest == digest
        outcome.lease.release()

    @property
    def kept(self) -> list[str]:
        return [one.digest for one in self.host.contents().adapters]


@pytest.fixture
def bench() -> Bench:
    return Bench()


def test_what_host_memory_has_is_not_asked_for(bench: Bench) -> None:
    bench.bring("a")
    bench.fetcher.fetch("a")
    assert bench.num_wakes == 1, "nothing else would tell"
    (outcome,) = bench.fetcher.outcomes()
    assert outcome.lease is not None
    assert list(bench.staging.asked.values()) == ["a"]
    host = bench.figures.snapshot().tiers[0]
    assert (host.tier, host.num_hits, host.num_misses, host.used_bytes) == ("host", 1, 1, SIZE)
    outcome.lease.release()


def test_a_failure_is_told_also_when_nobody_could_even_ask(bench: Bench) -> None:
    bench.fetcher.fetch("a")
    bench.staging.fail(0)
    assert [(one.digest, one.lease, one.message) for one in bench.fetcher.outcomes()] == [("a", None, "it is gone")]
    assert bench.num_wakes == 0
    bench.staging.is_down = True
    bench.fetcher.fetch("a")
    assert bench.num_wakes == 1
    assert len(bench.fetcher.outcomes()) == 1


def come(bench: Bench) -> None:
    bench.staging.come(0)


def fail(bench: Bench) -> None:
    bench.staging.fail(0)


@pytest.mark.parametrize("end", [come, fail])
def test_a_cancelled_fetch_is_not_taken_for_the_next(bench: Bench, end: Callable[[Bench], None]) -> None:
    bench.fetcher.fetch("a")
    end(bench)
    bench.fetcher.cancel("a")
    assert bench.staging.cancelled == [0]
    bench.fetcher.fetch("a")
    assert bench.fetcher.outcomes() == []
    bench.staging.come(1)
    (outcome,) = bench.fetcher.outcomes()
    assert outcome.lease is not None
    outcome.lease.release()
    assert bench.kept == ["a"]


def test_a_cancelled_fetch_gives_its_hold_on_host_memory_back() -> None:
    bench = Bench(num_kept=1)
    bench.bring("a")
    bench.fetcher.fetch("a")
    bench.fetcher.cancel("a")
    assert bench.fetcher.outcomes() == []
    bench.bring("b")
    assert bench.kept == ["b"], "nobody holds the other any more"


def test_room_is_made_for_what_is_coming_before_it_comes() -> None:
    bench = Bench(num_kept=4, num_at_once=2)
    for digest in "abcd":
        bench.bring(digest)
    assert bench.kept == ["d", "c", "b", "a"]
    for digest in "efg":
        bench.fetcher.fetch(digest)
    assert bench.kept == ["d", "c"], "for no more than come at a time"
    for number in (4, 5, 6):
        bench.staging.come(number)
    leases = [outcome.lease for outcome in bench.fetcher.outcomes()]
    assert bench.kept == ["g", "f", "e", "d"]
    bench.fetcher.fetch("h")
    bench.fetcher.cancel("h")
    for lease in leases:
        assert lease is not None
        lease.release()
    bench.bring("i")
    assert bench.kept == ["i", "g", "f", "e"], "what was cancelled is not expected any more"


def test_closing_gives_everything_back(bench: Bench) -> None:
    bench.bring("a")
    bench.fetcher.fetch("a")
    bench.fetcher.fetch("b")
    bench.fetcher.close()
    assert bench.staging.is_closed
    lease = bench.host.lease("a")
    assert lease is not None
    lease.release()
    assert bench.fetcher.outcomes() == []
