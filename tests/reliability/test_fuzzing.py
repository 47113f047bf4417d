from __future__ import annotations

import random
import time
from pathlib import Path

import numpy as np
import pytest

from loramux.adapter_store.errors import AdapterRejected
from tests.reliability.fuzzing import Reader, fuzz, limits, mutated, open_readers, verdict


def test_mutated_inputs_are_read_or_refused(tmp_path: Path) -> None:
    """The campaign `readers` also limits the memory, which would disturb other tests of this process."""
    failed: list[tuple[str, bytes]] = []
    for name, reader in open_readers(tmp_path).items():
        assert reader.seeds, name
        for seed in reader.seeds:
            reader.read(seed)
        found = fuzz(reader, 40, name, lambda kind, case, name=name: failed.append((f"{name}: {kind}", case)), None)
        assert found["executions"] == 40
    assert failed == []


def test_every_broken_promise_of_a_reader_is_noticed() -> None:
    def refuse(case: bytes) -> None:
        raise AdapterRejected("invalid_header", "no")

    def crash(case: bytes) -> None:
        raise KeyError("x")

    def hang(case: bytes) -> None:
        until = time.monotonic() + 60
        while time.monotonic() < until:
            pass

    def swallow(case: bytes) -> None:
        raise MemoryError

    assert verdict(bytes, b"", limit_bytes=None) is None
    assert verdict(refuse, b"", limit_bytes=None) is None
    assert verdict(crash, b"", limit_bytes=None) == "crashes"
    assert verdict(hang, b"", limit_s=0.05, limit_bytes=None) == "slow"
    assert verdict(swallow, b"", limit_bytes=None) == "large"


def test_reader_that_waits_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.reliability.fuzzing.WAIT_LIMIT_S", 0.05)
    assert verdict(lambda case: time.sleep(60), b"", limit_bytes=None) == "slow"


def test_memory_is_limited_and_the_limit_is_removed() -> None:
    # More than earlier tests can have left in the heap for reuse. Memory that is not written takes no room.
    size = 2 << 30
    with pytest.raises(MemoryError), limits(60.0, size // 2):
        np.empty(size, np.uint8)
    assert np.empty(size, np.uint8).nbytes == size


def test_mutations_follow_from_the_seed_and_change_the_input() -> None:
    first, second = (
        [mutated([b"some input"], dice) for _ in range(50)] for dice in (random.Random(1), random.Random(1))
    )
    assert first == second
    assert sum(case != b"some input" for case in first) > 25


def test_failed_cases_are_kept() -> None:
    kept: list[tuple[str, bytes]] = []
    reader = Reader(lambda case: 1 // 0, (b"x",))
    assert fuzz(reader, 3, "seed", lambda kind, case: kept.append((kind, case)), None)["crashes"] == 3
    assert [kind for kind, _ in kept] == ["crashes"] * 3
