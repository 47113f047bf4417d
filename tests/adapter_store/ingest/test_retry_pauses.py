from __future__ import annotations

import errno
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import structlog

from loramux.adapter_store.errors import BlobStoreUnavailable, WeightsBeingPurged
from loramux.adapter_store.ingest.retry_pauses import LONGEST_PAUSE_S, RetryPauses
from loramux.adapter_store.ingest.worker import IngestWorker
from loramux.adapter_store.registry.records import AdapterVersion
from tests.adapter_store.ingest.ingest_world import DirectValidator, IngestWorld

CANONICAL = "adapters/"


class Seconds:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


class BrokenPut:
    """Lets the store refuse the canonical file of the version `broken_id`."""

    def __init__(self, world: IngestWorld, monkeypatch: pytest.MonkeyPatch) -> None:
        self._world = world
        self._put = world.blobs.put
        self.broken_id: str | None = None
        self.error: Callable[[], Exception] = lambda: KeyError("a secret of the server")
        monkeypatch.setattr(world.blobs, "put", self)

    def __call__(self, key: str, source: Path | bytes) -> bool:
        running = [path.name for path in self._world.scratch.glob("adv_*")]
        if key.startswith(CANONICAL) and running == [self.broken_id]:
            raise self.error()
        return self._put(key, source)


def test_each_failure_doubles_the_pause_of_its_version() -> None:
    clock = Seconds()
    pauses = RetryPauses(5.0, clock)
    taken = []
    for _ in range(8):
        taken.append(pauses.note_failure("a"))
        clock.now_s += taken[-1] - 1
        assert pauses.paused() == {"a"}
        clock.now_s += 1
        assert pauses.paused() == set()
    assert taken == [5.0, 10.0, 20.0, 40.0, 80.0, 160.0, LONGEST_PAUSE_S, LONGEST_PAUSE_S]
    assert pauses.note_failure("b") == 5.0
    pauses.forget("a")
    assert pauses.note_failure("a") == 5.0
    # A version that another server has decided does not come back.
    clock.now_s += 2 * LONGEST_PAUSE_S
    assert pauses.paused() == set()
    assert pauses._pauses == {}


def test_version_that_fails_unexpectedly_is_tried_after_growing_pauses(
    world: IngestWorld, make_adapter: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Seconds()
    worker = IngestWorker(world.ingest, poll_s=5.0, clock=clock)
    broken = pending(world, make_adapter(seed=0))
    fault = BrokenPut(world, monkeypatch)
    fault.broken_id = broken.id
    failures = []
    for _ in range(15):
        with structlog.testing.capture_logs() as entries:
            worker._process_waiting()
        failures += [(clock.now_s, entry) for entry in entries if entry["event"] == "validation_postponed"]
        clock.now_s += 5.0
    assert [at_s for at_s, _ in failures] == [0.0, 5.0, 15.0, 35.0]
    assert [entry["retry_after_s"] for _, entry in failures] == [5.0, 10.0, 20.0, 40.0]
    assert {(entry["version_id"], entry["error"]) for _, entry in failures} == {(broken.id, "'a secret of the server'")}
    assert all(isinstance(entry["exc_info"], KeyError) for _, entry in failures)
    # The tenant's next version does not wait, even if the failed one is due.
    other = pending(world, make_adapter(seed=1))
    worker._process_waiting()
    assert shown(world, other).state == "ready"
    assert shown(world, broken).state == "pending"
    clock.now_s += 80.0
    fault.broken_id = None
    worker._process_waiting()
    assert shown(world, broken).state == "ready"


@pytest.mark.parametrize("migrated_url", ["sqlite"], indirect=True)
@pytest.mark.parametrize(
    "error",
    [
        BlobStoreUnavailable("the store is down"),
        WeightsBeingPurged("equal weights are being deleted"),
        OSError(errno.ENOSPC, "the disk is full"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_version_is_tried_at_every_look_during_an_outage(
    world: IngestWorld, make_adapter: Any, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    assert isinstance(world.validator, DirectValidator)
    clock = Seconds()
    worker = IngestWorker(world.ingest, poll_s=5.0, clock=clock)
    version = pending(world, make_adapter())
    fault = BrokenPut(world, monkeypatch)
    fault.broken_id, fault.error = version.id, lambda: error
    for _ in range(4):
        worker._process_waiting()
        clock.now_s += 5.0
    assert world.validator.num_calls == 4
    fault.broken_id = None
    worker._process_waiting()
    assert shown(world, version).state == "ready"


def pending(world: IngestWorld, files: Any) -> AdapterVersion:
    upload = world.upload(files.config_bytes, files.tensor_bytes)
    return world.ingest.create_version(world.adapter_id, upload.id)


def shown(world: IngestWorld, version: AdapterVersion) -> AdapterVersion:
    found = world.registry.get_version(version.adapter_id, version.number)
    assert found is not None
    return found
