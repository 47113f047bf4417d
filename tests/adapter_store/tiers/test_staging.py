"""The staging process: adapters come into shared memory, whole, whatever becomes of the process."""

from __future__ import annotations

import gc
import os
import shutil
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from loramux.adapter_store.blobs.local import LocalBlobStore
from loramux.adapter_store.formats.pack_target import PackTarget
from loramux.adapter_store.formats.packing import PackedAdapter
from loramux.adapter_store.tiers import staging as staging_module
from loramux.adapter_store.tiers import staging_link
from loramux.adapter_store.tiers.host_slab import ALIGNMENT
from loramux.adapter_store.tiers.load_timelines import LoadTimelines
from loramux.adapter_store.tiers.staging import MAX_ASKED, NotStaged, StagedAdapter, StagingProcess, StagingRefused
from loramux.adapter_store.tiers.staging_link import SILENCE_S
from loramux.adapter_store.tiers.tier_figures import StageCounts, TierFigures
from tests.adapter_store.waiting import wait_until

PLENTY = 1 << 26


class Bench:
    """A staging process over a local blob store that holds `adapters`."""

    def __init__(self, target: PackTarget, directory: Path, store_adapter: Any, num_adapters: int) -> None:
        blobs = LocalBlobStore(directory / "blobs")
        self.adapters: list[PackedAdapter] = [store_adapter(blobs, seed=seed).packed for seed in range(num_adapters)]
        self._target = target
        self._directory = directory
        self.figures = TierFigures(LoadTimelines())
        self.now_s = 0.0
        self._opened: list[StagingProcess] = []

    def open(
        self,
        memory_bytes: int = PLENTY,
        disk_bytes: int = PLENTY,
        num_threads: int = 2,
        blob_url: str | None = None,
    ) -> StagingProcess:
        staging = StagingProcess(
            self._target,
            blob_url or f"file://{self._directory / 'blobs'}",
            str(self._directory / "disk"),
            disk_bytes,
            memory_bytes,
            num_threads,
            self.figures,
            lambda: self.now_s,
        )
        self._opened.append(staging)
        staging.await_opened(30)
        return staging

    def close(self) -> None:
        for staging in self._opened:
            staging.close()

    def is_right(self, found: StagedAdapter) -> bool:
        (wanted,) = (one for one in self.adapters if one.digest == found.digest)
        return (
            np.array_equal(found.packed.payload, wanted.payload)
            and found.packed.layout is wanted.layout
            and np.array_equal(found.packed.scales, wanted.scales)
            and np.array_equal(found.packed.outer_scales, wanted.outer_scales)
        )


@pytest.fixture
def bench(target: PackTarget, tmp_path: Path, store_adapter: Any) -> Iterator[Bench]:
    bench = Bench(target, tmp_path, store_adapter, 3)
    yield bench
    bench.close()


def outcomes(staging: StagingProcess, count: int = 1) -> list[StagedAdapter | NotStaged]:
    found: list[StagedAdapter | NotStaged] = []

    def are_there() -> bool:
        found.extend(staging.outcomes())
        return len(found) >= count

    wait_until(are_there)
    assert len(found) == count
    return found


def staged(staging: StagingProcess, digest: str) -> StagedAdapter:
    number = staging.stage(digest)
    (outcome,) = outcomes(staging)
    assert isinstance(outcome, StagedAdapter)
    assert outcome.number == number
    return outcome


def place(staging: StagingProcess, found: StagedAdapter) -> int | None:
    """Where it begins in the shared memory; None where it has memory of its own."""
    begin = int(found.packed.payload.ctypes.data - staging.memory.ctypes.data)
    return begin if 0 <= begin < staging.memory.size else None


def process_of(staging: StagingProcess) -> subprocess.Popen[bytes]:
    assert staging._link is not None
    return staging._link.process


def heard_s(staging: StagingProcess) -> float:
    assert staging._link is not None
    return staging._link._heard_s


def await_place(staging: StagingProcess, digest: str, begin: int) -> None:
    """What used that memory may take a moment to let go of it."""
    wait_until(lambda: place(staging, staged(staging, digest)) == begin)


def kill(staging: StagingProcess) -> None:
    os.kill(process_of(staging).pid, signal.SIGKILL)


def stages(bench: Bench) -> dict[str, StageCounts]:
    return {f"{one.tier} {one.stage}": one for one in bench.figures.snapshot().stages if one.count}


def test_an_adapter_comes_from_the_blob_store_and_then_from_the_disk(bench: Bench) -> None:
    staging = bench.open()
    digest = bench.adapters[0].digest
    timelines = bench.figures.timelines
    assert timelines is not None
    for number in (1, 2):
        timelines.begin(digest)
        found = staged(staging, digest)
        assert bench.is_right(found)
        assert place(staging, found) is not None
        timeline = timelines.take(digest)
        assert timeline is not None
        passed = [f"{one.tier} {one.stage}" for one in timeline.stages]
        assert ("blobs fetch" in passed, "disk read" in passed) == (number == 1, True)
        assert all(timeline.started_ns <= one.started_ns <= one.ended_ns for one in timeline.stages)
        del found
    counts = bench.figures.snapshot()
    lookups = {tier.tier: (tier.num_hits, tier.num_misses) for tier in counts.tiers}
    assert lookups == {"host": (0, 0), "disk": (1, 1), "blobs": (1, 1)}
    assert {tier.tier: tier.used_bytes > 0 for tier in counts.tiers} == {"host": False, "disk": True, "blobs": False}
    assert (counts.num_loaded, counts.num_failed) == (2, 0)
    assert stages(bench)["disk read"].num_bytes == 2 * bench.adapters[0].payload.nbytes


def test_what_nobody_uses_any_more_gives_its_memory_back(bench: Bench) -> None:
    first, second, third = bench.adapters
    staging = bench.open(memory_bytes=first.payload.nbytes + ALIGNMENT)
    held = staged(staging, first.digest)
    assert place(staging, held) == 0
    beside = staged(staging, second.digest)
    assert place(staging, beside) is None
    assert bench.is_right(held)
    assert bench.is_right(beside)
    view = held.packed.payload[1:]
    del held
    assert place(staging, staged(staging, third.digest)) is None, "a view of it is left"
    # Collected on another thread, as after a copy.
    thread = threading.Thread(target=lambda views: views.clear(), args=([view],))
    del view
    thread.start()
    thread.join()
    gc.collect()
    await_place(staging, third.digest, 0)


def test_without_room_on_the_disk_adapters_come_all_the_same(bench: Bench) -> None:
    staging = bench.open(disk_bytes=0)
    for adapter in bench.adapters:
        assert bench.is_right(staged(staging, adapter.digest))


def test_the_same_adapter_twice_lies_in_one_place_until_both_are_gone(bench: Bench) -> None:
    staging = bench.open()
    first, second, _ = bench.adapters
    one, other = staged(staging, first.digest), staged(staging, first.digest)
    assert place(staging, one) == place(staging, other) == 0
    del one
    assert place(staging, staged(staging, second.digest)) != 0
    assert bench.is_right(other)


def test_what_was_cancelled_is_not_told_and_keeps_no_memory(bench: Bench) -> None:
    staging = bench.open()
    os.kill(process_of(staging).pid, signal.SIGSTOP)
    for adapter in bench.adapters:
        staging.cancel(staging.stage(adapter.digest))
    os.kill(process_of(staging).pid, signal.SIGCONT)
    wait_until(lambda: not (staging.outcomes() or staging._asked))
    await_place(staging, bench.adapters[1].digest, 0)


def test_an_answer_that_nobody_has_looked_at_can_be_cancelled(bench: Bench) -> None:
    staging = bench.open()
    number = staging.stage(bench.adapters[0].digest)

    def has_come() -> bool:
        staging.receive()
        return staging.has_outcomes

    wait_until(has_come)
    staging.cancel(number)
    assert staging.outcomes() == []
    await_place(staging, bench.adapters[1].digest, 0)


@pytest.mark.parametrize("digest", ["0" * 64, "../../etc/passwd", "", "0" * 10_000])
def test_an_adapter_that_is_nowhere_is_told(bench: Bench, digest: str) -> None:
    staging = bench.open()
    number = staging.stage(digest)
    (outcome,) = outcomes(staging)
    assert isinstance(outcome, NotStaged)
    assert (outcome.number, outcome.digest) == (number, digest)
    assert outcome.message
    assert bench.is_right(staged(staging, bench.adapters[0].digest))


def test_only_so_many_are_asked_for_at_a_time_and_all_come(bench: Bench) -> None:
    staging = bench.open()
    os.kill(process_of(staging).pid, signal.SIGSTOP)
    numbers = [staging.stage(bench.adapters[place % 3].digest) for place in range(3 * MAX_ASKED)]
    assert len(staging._asked) == MAX_ASKED
    os.kill(process_of(staging).pid, signal.SIGCONT)
    found = outcomes(staging, len(numbers))
    assert sorted(one.number for one in found) == numbers
    assert all(isinstance(one, StagedAdapter) and bench.is_right(one) for one in found)


@pytest.mark.parametrize("max_numbers", [1, 1000])
def test_a_process_that_dies_is_followed_by_one_that_is_asked_again(
    bench: Bench, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, max_numbers: int
) -> None:
    monkeypatch.setattr(staging_module, "MAX_NUMBERS", max_numbers)
    first, second, third = bench.adapters
    staging = bench.open()
    held = [staged(staging, first.digest), staged(staging, first.digest), staged(staging, second.digest)]
    freed = staged(staging, third.digest)
    before = bench.figures.snapshot()
    bench.now_s = 10.0
    os.kill(process_of(staging).pid, signal.SIGSTOP)
    number = staging.stage(third.digest)
    dead = process_of(staging).pid
    # It comes back while there is nobody to be told.
    freed_at = place(staging, freed)
    del freed
    kill(staging)
    (outcome,) = outcomes(staging)
    assert isinstance(outcome, StagedAdapter)
    assert outcome.number == number
    assert process_of(staging).pid != dead
    assert capfd.readouterr().err == "the staging process ended: exit code -9\n"
    assert place(staging, outcome) == freed_at
    for one in (*held, outcome):
        assert bench.is_right(one), "what was given out stays as it was"
    after = bench.figures.snapshot()
    assert after.num_loaded == before.num_loaded + 1
    assert [tier.used_bytes for tier in after.tiers] == [tier.used_bytes for tier in before.tiers]
    # What the dead process gave out comes back to the new one.
    places = {place(staging, one) for one in held}
    held.clear()
    del one
    assert place(staging, staged(staging, first.digest)) in places


def test_what_two_processes_die_of_fails_and_others_come_later(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    staging = bench.open()
    monkeypatch.setattr(staging_link, "COMMAND", ("/bin/false",))
    bench.now_s = 10.0
    kill(staging)
    asked = [staging.stage(adapter.digest) for adapter in bench.adapters[:2]]
    found = outcomes(staging, 2)
    assert [one.number for one in found] == asked
    assert all(isinstance(one, NotStaged) and "the process that fetches adapters ended" in one.message for one in found)
    assert staging.fileno() == -1
    # One that dies at once is not followed by another at once, and who asks meanwhile waits for the next.
    number = staging.stage(bench.adapters[0].digest)
    assert staging.outcomes() == []
    assert staging.fileno() == -1
    monkeypatch.undo()
    bench.now_s += staging_module.RESTART_S
    (outcome,) = outcomes(staging)
    assert isinstance(outcome, StagedAdapter)
    assert outcome.number == number
    assert bench.is_right(outcome)
    assert staging.fileno() >= 0


def test_a_process_that_cannot_be_started_again_fails_what_waits(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    staging = bench.open()
    monkeypatch.setattr(staging_link, "COMMAND", ("/nowhere/at/all",))
    bench.now_s = 10.0
    kill(staging)
    staging.stage(bench.adapters[0].digest)
    (outcome,) = outcomes(staging)
    assert isinstance(outcome, NotStaged)
    assert staging.fileno() == -1
    with pytest.raises(StagingRefused, match="cannot be started"):
        bench.open()


def test_memory_that_cannot_be_had_fails_one_adapter(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    staging = bench.open(memory_bytes=0)
    num_open = len(os.listdir("/proc/self/fd"))

    def full(descriptor: int) -> Any:
        raise OSError("there is none")

    with monkeypatch.context() as patched:
        patched.setattr(staging_module, "mapped", full)
        staging.stage(bench.adapters[0].digest)
        (outcome,) = outcomes(staging)
        assert isinstance(outcome, NotStaged)
        assert "memory" in outcome.message
    held = [staged(staging, adapter.digest) for adapter in bench.adapters]
    assert all(bench.is_right(one) for one in held)
    assert len(os.listdir("/proc/self/fd")) == num_open, "what lies outside the slab holds no descriptors"


def test_a_process_that_refuses_later_says_why(bench: Bench, tmp_path: Path) -> None:
    staging = bench.open()
    shutil.rmtree(tmp_path / "disk")
    (tmp_path / "disk").write_text("a file where a directory should be")
    bench.now_s = 10.0
    kill(staging)
    staging.stage(bench.adapters[0].digest)
    (outcome,) = outcomes(staging)
    assert isinstance(outcome, NotStaged)
    assert "give another disk_tier_dir" in outcome.message
    assert str(tmp_path) not in outcome.message
    (tmp_path / "disk").unlink()
    bench.now_s += staging_module.RESTART_S
    assert bench.is_right(staged(staging, bench.adapters[0].digest))


def test_a_process_that_says_nothing_is_killed_and_followed_by_another(
    bench: Bench, capfd: pytest.CaptureFixture[str]
) -> None:
    staging = bench.open()
    bench.now_s = 1000.0
    stopped = process_of(staging).pid
    os.kill(stopped, signal.SIGSTOP)
    number = staging.stage(bench.adapters[0].digest)
    looked: list[bool] = []
    staging.look(lambda: looked.append(True))
    assert staging.outcomes() == []
    bench.now_s += SILENCE_S - 0.1
    assert staging.outcomes() == []
    assert process_of(staging).poll() is None
    bench.now_s += 0.1
    (outcome,) = outcomes(staging)
    assert isinstance(outcome, StagedAdapter)
    assert outcome.number == number
    assert bench.is_right(outcome)
    assert process_of(staging).pid != stopped
    staging.answer_looks()
    assert looked == [True]
    assert f"process {stopped} is killed" in capfd.readouterr().err


def test_a_process_that_waits_for_the_blob_store_is_let_live(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{silent.getsockname()[1]}")
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "x")
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "x")
        staging = bench.open(blob_url="s3://silent")
        process = process_of(staging)
        staging.stage(bench.adapters[0].digest)
        for _ in range(5):
            bench.now_s += SILENCE_S
            # It is asked, and may take what time the machine needs to say that it runs.
            wait_until(lambda: not staging.outcomes() and heard_s(staging) == bench.now_s)
        assert process_of(staging) is process


def test_the_process_ends_with_its_engine(bench: Bench) -> None:
    staging = bench.open()
    process = process_of(staging)
    staging.close()
    assert process.poll() == 0
    assert staging.fileno() == -1


def test_a_look_tells_what_the_disk_holds(bench: Bench) -> None:
    staging = bench.open()
    assert staging.contents is None
    held = [staged(staging, adapter.digest) for adapter in bench.adapters]
    looked = threading.Event()
    staging.look(looked.set)

    def has_looked() -> bool:
        assert staging.outcomes() == []
        staging.answer_looks()
        return looked.is_set()

    wait_until(has_looked)
    assert staging.contents is not None
    assert staging.contents.tier == "disk"
    assert [one.digest for one in staging.contents.adapters] == [one.digest for one in reversed(held)]
    # Whoever looks when nobody can answer gets what is known.
    looked.clear()
    os.kill(process_of(staging).pid, signal.SIGSTOP)
    staging.look(looked.set)
    kill(staging)
    wait_until(has_looked)
    looked.clear()
    staging.look(looked.set)
    wait_until(has_looked)
    assert len(staging.contents.adapters) == 3


@pytest.mark.parametrize("blob_url", ["ftp://somewhere", "s3://"])
def test_a_blob_url_that_cannot_be_is_refused_by_name(target: PackTarget, tmp_path: Path, blob_url: str) -> None:
    staging = StagingProcess(target, blob_url, str(tmp_path / "disk"), PLENTY, PLENTY, 1, TierFigures())
    with pytest.raises(StagingRefused, match=r"use .*s3://BUCKET"):
        staging.await_opened(30)
    staging.close()


def test_a_process_that_never_opens_is_not_waited_for_without_end(
    target: PackTarget, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(staging_link, "COMMAND", ("/bin/sh", "-c", "sleep 20 #"))
    monkeypatch.setattr(staging_link, "END_GRACE_S", 0.1)
    staging = StagingProcess(target, "file:///x", str(tmp_path / "disk"), PLENTY, PLENTY, 1, TierFigures())
    started_s = time.monotonic()
    with pytest.raises(StagingRefused, match="did not start"):
        staging.await_opened(0.2)
    process = process_of(staging)
    staging.close()
    assert process.poll() is not None
    assert time.monotonic() - started_s < 10
