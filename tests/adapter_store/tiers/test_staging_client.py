from __future__ import annotations

import gc
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from loramux.adapter_store.blobs.local import LocalBlobStore
from loramux.adapter_store.formats.packed.pack_target import PackTarget
from loramux.adapter_store.formats.packed.packing import PackedAdapter
from loramux.adapter_store.tiers import staging_client, staging_link
from loramux.adapter_store.tiers.host_slab import ALIGNMENT, EngineMemory
from loramux.adapter_store.tiers.host_tier import HostTier
from loramux.adapter_store.tiers.staged_adapter import NotStaged, StagedAdapter
from loramux.adapter_store.tiers.staging_client import MAX_ASKED, StagingClient, StagingRefused
from loramux.adapter_store.tiers.staging_link import SILENCE_S
from loramux.adapter_store.tiers.tier_figures import StageCounts
from tests.adapter_store.open_files import open_files
from tests.adapter_store.waiting import wait_until

PLENTY = 1 << 26


class Bench:
    """By default, host memory keeps only the adapters in use."""

    def __init__(self, target: PackTarget, directory: Path, store_adapter: Any, num_adapters: int) -> None:
        blobs = LocalBlobStore(directory / "blobs")
        self.adapters: list[PackedAdapter] = [store_adapter(blobs, seed=seed).packed for seed in range(num_adapters)]
        self._target = target
        self._directory = directory
        self.now_s = 0.0
        self.num_wakes = 0
        self._opened: list[StagingClient] = []

    def start(
        self,
        memory_bytes: int = PLENTY,
        disk_bytes: int = PLENTY,
        num_threads: int = 2,
        blob_url: str | None = None,
        host_bytes: int = 0,
    ) -> StagingClient:
        client = StagingClient(
            self._target,
            blob_url or f"file://{self._directory / 'blobs'}",
            str(self._directory / "disk"),
            disk_bytes,
            str(self._directory / "base"),
            EngineMemory(memory_bytes),
            HostTier(host_bytes),
            num_threads,
            self._wake,
            lambda: self.now_s,
        )
        self._opened.append(client)
        return client

    def open(self, **settings: Any) -> StagingClient:
        client = self.start(**settings)
        client.open(60)
        return client

    def close(self) -> None:
        for client in self._opened:
            client.close()

    def is_right(self, found: StagedAdapter | NotStaged) -> bool:
        assert isinstance(found, StagedAdapter)
        (wanted,) = (one for one in self.adapters if one.digest == found.digest)
        return (
            np.array_equal(found.packed.payload, wanted.payload)
            and found.packed.layout is wanted.layout
            and np.array_equal(found.packed.scales, wanted.scales)
            and np.array_equal(found.packed.outer_scales, wanted.outer_scales)
        )

    def _wake(self) -> None:
        self.num_wakes += 1


@pytest.fixture
def bench(target: PackTarget, tmp_path: Path, store_adapter: Any) -> Iterator[Bench]:
    bench = Bench(target, tmp_path, store_adapter, 3)
    yield bench
    bench.close()


def results(client: StagingClient, count: int = 1) -> list[StagedAdapter | NotStaged]:
    found: list[StagedAdapter | NotStaged] = []

    def are_there() -> bool:
        found.extend(client.poll())
        return len(found) >= count

    wait_until(are_there)
    assert len(found) == count
    return found


def staged(client: StagingClient, digest: str) -> StagedAdapter:
    client.request(digest)
    (found,) = results(client)
    assert isinstance(found, StagedAdapter)
    assert found.digest == digest
    return found


def not_staged(client: StagingClient, digest: str) -> NotStaged:
    client.request(digest)
    (found,) = results(client)
    assert isinstance(found, NotStaged)
    assert found.digest == digest
    return found


def place(client: StagingClient, found: StagedAdapter | NotStaged) -> int | None:
    """The adapter's offset in shared memory, or None if the adapter has its own memory."""
    assert isinstance(found, StagedAdapter)
    memory = client._memory.array
    begin = int(found.packed.payload.ctypes.data - memory.ctypes.data)
    return begin if 0 <= begin < memory.size else None


def passing_place(client: StagingClient, digest: str) -> int | None:
    found = staged(client, digest)
    begin = place(client, found)
    found.release()
    return begin


def process_of(client: StagingClient) -> subprocess.Popen[bytes]:
    assert client._link is not None
    return client._link.process


def heard_s(client: StagingClient) -> float:
    assert client._link is not None
    return client._link._heard_s


def await_place(client: StagingClient, digest: str, begin: int) -> None:
    """Wait until the adapter is staged at offset `begin`, because the memory's last user may release it a little
    late.
    """
    wait_until(lambda: passing_place(client, digest) == begin)


def stop(client: StagingClient) -> None:
    os.kill(process_of(client).pid, signal.SIGSTOP)


def go_on(client: StagingClient) -> None:
    os.kill(process_of(client).pid, signal.SIGCONT)


def kill(client: StagingClient) -> None:
    os.kill(process_of(client).pid, signal.SIGKILL)


def kept(client: StagingClient) -> list[str]:
    """The digests in host memory, most recently used first."""
    return [one.digest for one in client.contents()[0].adapters]


def stages(client: StagingClient) -> dict[str, StageCounts]:
    return {f"{one.tier} {one.stage}": one for one in client.counts().stages if one.count}


def test_forgotten_adapter_is_deleted_from_the_engines_own_disk(bench: Bench, tmp_path: Path) -> None:
    client = bench.open(host_bytes=PLENTY)
    first, second, other = (one.digest for one in bench.adapters)

    def has_no_process() -> bool:
        client.attend()
        return client.pid is None

    def on_disk() -> set[str]:
        return {path.name.removesuffix(".packed") for path in (tmp_path / "disk").glob("*/*.packed")}

    for digest in (first, second, other):
        staged(client, digest).release()
    assert on_disk() == {first, second, other}
    client.forget(first)
    wait_until(lambda: on_disk() == {second, other})
    assert first not in kept(client)

    kill(client)
    wait_until(has_no_process)
    client.forget(second)
    assert on_disk() == {second, other}
    # A process is started after a moment, and deletes the files.
    bench.now_s += 1.0
    client.poll()
    wait_until(lambda: on_disk() == {other})

    # A process can die before it has read the message.
    wait_until(lambda: not client.poll() and not client._purging)
    stop(client)
    client.forget(other)
    kill(client)
    wait_until(has_no_process)
    bench.now_s += 1.0
    client.poll()
    wait_until(lambda: on_disk() == set())


def test_adapter_comes_from_the_blob_store_first_and_then_from_disk(bench: Bench) -> None:
    client = bench.open()
    digest = bench.adapters[0].digest
    for number in (1, 2):
        started_ns = time.time_ns()
        found = staged(client, digest)
        assert bench.is_right(found)
        assert place(client, found) is not None
        passed = [f"{one.tier} {one.stage}" for one in found.stages]
        assert passed[0] == "host lookup"
        assert ("blobs fetch" in passed, "disk read" in passed) == (number == 1, True)
        assert all(started_ns <= one.started_ns <= one.ended_ns for one in found.stages)
        if number == 1:
            found.release()
        del found
    counts = client.counts()
    lookups = {tier.tier: (tier.num_hits, tier.num_misses) for tier in counts.tiers}
    assert lookups == {"host": (0, 2), "disk": (1, 1), "blobs": (1, 1)}
    assert {tier.tier: tier.used_bytes > 0 for tier in counts.tiers} == {"host": True, "disk": True, "blobs": False}
    assert (counts.num_loaded, counts.num_failed) == (2, 0)
    assert stages(client)["disk read"].num_bytes == 2 * bench.adapters[0].payload.nbytes


def test_adapter_in_host_memory_is_not_requested(bench: Bench) -> None:
    client = bench.open(host_bytes=PLENTY)
    digest = bench.adapters[0].digest
    staged(client, digest).release()
    assert bench.num_wakes == 0
    client.request(digest)
    assert bench.num_wakes == 1, "nothing else wakes the engine"
    (found,) = client.poll()
    assert bench.is_right(found)
    counts = client.counts()
    host = counts.tiers[0]
    size = bench.adapters[0].payload.nbytes
    assert (host.tier, host.num_hits, host.num_misses, host.used_bytes) == ("host", 1, 1, size)
    assert counts.num_loaded == 1
    assert [one.tier for one in found.stages] == ["host"]


def test_forgotten_adapter_is_fetched_again(bench: Bench) -> None:
    client = bench.open(host_bytes=PLENTY)
    digest = bench.adapters[0].digest
    staged(client, digest).release()
    assert kept(client) == [digest]
    client.forget(digest)
    assert kept(client) == []
    staged(client, digest).release()
    assert [one.num_hits for one in client.counts().tiers if one.tier == "host"] == [0]


def test_hold_is_released_once_and_only_holds_exceed_the_limit(bench: Bench) -> None:
    first, second, third = bench.adapters
    size = first.payload.nbytes
    client = bench.open(host_bytes=size)
    held = [staged(client, adapter.digest) for adapter in (first, second)]
    assert client.contents()[0].used_bytes == 2 * size, "held adapters stay even above the limit"
    again = staged(client, first.digest)
    held[0].release()
    held[0].release()
    held[1].release()
    assert kept(client) == [first.digest], "one more lease is held"
    again.release()
    staged(client, third.digest).release()
    assert kept(client) == [third.digest]


def test_cancelled_request_releases_its_hold_on_host_memory(bench: Bench) -> None:
    first, second, _ = bench.adapters
    client = bench.open(host_bytes=first.payload.nbytes)
    staged(client, first.digest).release()
    client.request(first.digest)
    client.cancel(first.digest)
    assert client.poll() == []
    staged(client, second.digest).release()
    assert kept(client) == [second.digest], "the other is no longer held"


def test_room_is_made_in_advance_for_loading_adapters(target: PackTarget, tmp_path: Path, store_adapter: Any) -> None:
    bench = Bench(target, tmp_path, store_adapter, 9)
    a, b, c, d, e, f, g, h, i = (adapter.digest for adapter in bench.adapters)
    client = bench.open(host_bytes=4 * bench.adapters[0].payload.nbytes)
    for digest in (a, b, c, d):
        staged(client, digest).release()
    assert kept(client) == [d, c, b, a]
    stop(client)
    for digest in (e, f, g):
        client.request(digest)
    assert kept(client) == [d, c], "room is made only for the adapters loading now"
    go_on(client)
    held = results(client, 3)
    assert sorted(kept(client)) == sorted([d, e, f, g])
    stop(client)
    client.request(h)
    client.cancel(h)
    go_on(client)
    for one in held:
        assert isinstance(one, StagedAdapter)
        one.release()
    staged(client, i).release()
    assert sorted(kept(client)) == sorted([e, f, g, i]), "no room is kept for cancelled requests"
    bench.close()


def test_close_releases_everything(bench: Bench) -> None:
    first, second, third = bench.adapters
    size = first.payload.nbytes
    client = bench.open(host_bytes=2 * size)
    for digest in (first.digest, second.digest):
        staged(client, digest).release()
    stop(client)
    client.request(first.digest)
    client.request(third.digest)
    go_on(client)
    client.close()
    assert client.poll() == []
    assert all(entry.num_leases == 0 for entry in client._host._entries.values())


def test_unused_adapter_releases_its_memory(bench: Bench) -> None:
    first, second, third = bench.adapters
    client = bench.open(memory_bytes=first.payload.nbytes + ALIGNMENT)
    held = staged(client, first.digest)
    assert place(client, held) == 0
    beside = staged(client, second.digest)
    assert place(client, beside) is None
    assert bench.is_right(held)
    assert bench.is_right(beside)
    view = held.packed.payload[1:]
    held.release()
    del held
    assert passing_place(client, third.digest) is None, "a view still exists"
    # The payload is garbage-collected on another thread, as happens after a copy.
    thread = threading.Thread(target=lambda views: views.clear(), args=([view],))
    del view
    thread.start()
    thread.join()
    gc.collect()
    await_place(client, third.digest, 0)


def test_adapters_are_staged_without_disk_space(bench: Bench) -> None:
    client = bench.open(disk_bytes=0)
    for adapter in bench.adapters:
        assert bench.is_right(staged(client, adapter.digest))


def test_two_holds_on_an_adapter_share_its_memory_until_both_end(bench: Bench) -> None:
    client = bench.open()
    first, second, _ = bench.adapters
    one, other = staged(client, first.digest), staged(client, first.digest)
    assert place(client, one) == place(client, other) == 0
    one.release()
    del one
    assert passing_place(client, second.digest) != 0
    assert bench.is_right(other)
    other.release()
    view = other.packed.payload
    del other
    # The adapter was evicted from host memory while its bytes were still in use.
    third = staged(client, first.digest)
    assert place(client, third) != 0
    assert bench.is_right(third)
    assert np.array_equal(view, first.payload)


def test_cancelled_request_is_not_reported_and_keeps_no_memory(bench: Bench) -> None:
    client = bench.open()
    stop(client)
    for adapter in bench.adapters:
        client.request(adapter.digest)
        client.cancel(adapter.digest)
    go_on(client)
    wait_until(lambda: not (client.poll() or client._asked))
    await_place(client, bench.adapters[1].digest, 0)


def test_unread_answer_can_be_cancelled(bench: Bench) -> None:
    client = bench.open()
    client.request(bench.adapters[0].digest)

    def has_come() -> bool:
        client.attend()
        return bool(client._results)

    wait_until(has_come)
    client.cancel(bench.adapters[0].digest)
    assert client.poll() == []
    await_place(client, bench.adapters[1].digest, 0)


@pytest.mark.parametrize("is_stored", [True, False], ids=["staged", "not staged"])
@pytest.mark.parametrize("has_come", [True, False], ids=["answered", "not answered"])
def test_answer_to_a_cancelled_request_is_not_used_for_the_next(bench: Bench, is_stored: bool, has_come: bool) -> None:
    client = bench.open()
    digest = bench.adapters[0].digest if is_stored else "0" * 64
    if not has_come:
        stop(client)
    client.request(digest)
    if has_come:
        assert select.select([client], [], [], 60)[0]
        stop(client)
    client.cancel(digest)
    client.request(digest)
    client.attend()
    assert client.poll() == []
    go_on(client)
    (found,) = results(client)
    assert isinstance(found, StagedAdapter) == is_stored
    wait_until(lambda: not (client.poll() or client._asked))
    if isinstance(found, StagedAdapter):
        assert bench.is_right(found)
        found.release()
        del found
        await_place(client, bench.adapters[1].digest, 0)


@pytest.mark.parametrize("digest", ["0" * 64, "../../etc/passwd", "", "0" * 10_000])
def test_missing_adapter_is_reported(bench: Bench, digest: str) -> None:
    client = bench.open()
    assert not_staged(client, digest).message
    assert bench.is_right(staged(client, bench.adapters[0].digest))


def test_concurrent_requests_are_limited_and_all_are_answered(bench: Bench) -> None:
    client = bench.open()
    stop(client)
    digests = [*(adapter.digest for adapter in bench.adapters), *(f"{number:064x}" for number in range(3 * MAX_ASKED))]
    for digest in digests:
        client.request(digest)
    assert len(client._asked) == MAX_ASKED
    go_on(client)
    found = results(client, len(digests))
    assert sorted(one.digest for one in found) == sorted(digests)
    assert sum(isinstance(one, StagedAdapter) and bench.is_right(one) for one in found) == len(bench.adapters)


def test_fast_process_gets_more_requests_between_two_polls(bench: Bench) -> None:
    client = bench.open(num_threads=2, host_bytes=PLENTY)
    kept = bench.adapters[0].digest
    staged(client, kept).release()
    missing = iter([f"{number:064x}" for number in range(200)])

    def fill() -> int:
        """Request as many adapters as the client takes. Returns the number of requests."""
        digest = next(missing)
        while client.takes(digest):
            client.request(digest)
            digest = next(missing)
        assert client.takes(kept), "it is in host memory"
        return len(client._requests)

    def answer() -> None:
        """Wait until all requests are answered, and make the next `poll` return the answers."""
        wait_until(lambda: client.attend() or not client._asked)

    client.poll()
    for number in (4, 8, 16, MAX_ASKED, MAX_ASKED):
        assert fill() == number
        answer()
        assert len(client.poll()) == number
    client.poll()
    assert fill() == 4, "none was answered since the poll before"


@pytest.mark.parametrize("max_pieces", [1, 1000])
def test_dead_process_is_replaced_and_its_requests_are_repeated(
    bench: Bench, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, max_pieces: int
) -> None:
    monkeypatch.setattr(staging_client, "MAX_PIECES", max_pieces)
    first, second, third = bench.adapters
    client = bench.open()
    held = [staged(client, first.digest), staged(client, first.digest), staged(client, second.digest)]
    freed = staged(client, third.digest)
    before = client.counts()
    bench.now_s = 10.0
    stop(client)
    freed_at, view = place(client, freed), freed.packed.payload
    freed.release()
    del freed
    client.request(third.digest)
    dead = process_of(client).pid
    # The memory is freed while there is no process to notify.
    del view
    kill(client)
    (outcome,) = results(client)
    assert outcome.digest == third.digest
    assert process_of(client).pid != dead
    told = [line for line in capfd.readouterr().err.splitlines() if "staging process" in line]
    assert told == ["the staging process died: exit code -9"]
    assert place(client, outcome) == freed_at
    for one in (*held, outcome):
        assert bench.is_right(one), "adapters already handed out are unchanged"
    after = client.counts()
    assert after.num_loaded == before.num_loaded + 1
    assert [tier.used_bytes for tier in after.tiers] == [tier.used_bytes for tier in before.tiers]
    # The new process can reuse the dead process's memory once it is released.
    places = {place(client, one) for one in held}
    for released in held:
        released.release()
    held.clear()
    del one, released
    assert passing_place(client, first.digest) in places


def test_requests_fail_after_two_dead_processes_and_later_ones_succeed(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = bench.open()
    monkeypatch.setattr(staging_link, "COMMAND", ("/bin/false",))
    bench.now_s = 10.0
    kill(client)
    asked = [adapter.digest for adapter in bench.adapters[:2]]
    for digest in asked:
        client.request(digest)
    found = results(client, 2)
    assert [one.digest for one in found] == asked
    assert all(isinstance(one, NotStaged) and "the process that fetches adapters died" in one.message for one in found)
    assert client.fileno() == -1
    # A process that dies on startup is not replaced right away. Requests wait for the next process.
    client.request(asked[0])
    assert client.poll() == []
    assert client.fileno() == -1
    monkeypatch.undo()
    bench.now_s += staging_client.RESTART_S
    (outcome,) = results(client)
    assert bench.is_right(outcome)
    assert client.fileno() >= 0


def test_waiting_requests_fail_if_the_process_cannot_be_restarted(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = bench.open()
    monkeypatch.setattr(staging_link, "COMMAND", ("/nowhere/at/all",))
    bench.now_s = 10.0
    kill(client)
    assert not_staged(client, bench.adapters[0].digest).message
    assert client.fileno() == -1
    # The next attempt cannot even send a request.
    bench.now_s += staging_client.RESTART_S
    assert bench.num_wakes == 0
    client.request(bench.adapters[0].digest)
    assert bench.num_wakes == 1
    assert [type(one) for one in client.poll()] == [NotStaged]
    with pytest.raises(StagingRefused, match="cannot be started"):
        bench.open()


def test_failed_allocation_fails_only_one_adapter(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    client = bench.open(memory_bytes=0)
    slab = "/memfd:adapters"
    before = open_files(slab)

    def full(descriptor: int) -> Any:
        raise OSError("there is none")

    with monkeypatch.context() as patched:
        patched.setattr(staging_client, "mapped", full)
        assert "memory" in not_staged(client, bench.adapters[0].digest).message
    held = [staged(client, adapter.digest) for adapter in bench.adapters]
    assert all(bench.is_right(one) for one in held)
    assert open_files(slab) == before, "memory outside the slab needs no descriptors"


def test_process_that_refuses_to_restart_reports_the_reason(bench: Bench, tmp_path: Path) -> None:
    client = bench.open()
    shutil.rmtree(tmp_path / "disk")
    (tmp_path / "disk").write_text("a file where a directory should be")
    bench.now_s = 10.0
    kill(client)
    outcome = not_staged(client, bench.adapters[0].digest)
    assert "choose another disk_tier_dir" in outcome.message
    assert str(tmp_path) not in outcome.message
    (tmp_path / "disk").unlink()
    bench.now_s += staging_client.RESTART_S
    assert bench.is_right(staged(client, bench.adapters[0].digest))


def test_silent_process_is_killed_and_replaced(bench: Bench, capfd: pytest.CaptureFixture[str]) -> None:
    client = bench.open()
    bench.now_s = 1000.0
    stopped = process_of(client).pid
    stop(client)
    client.request(bench.adapters[0].digest)
    looked: list[bool] = []
    client.look(lambda: looked.append(True))
    assert client.poll() == []
    bench.now_s += SILENCE_S - 0.1
    assert client.poll() == []
    assert process_of(client).poll() is None
    bench.now_s += 0.1
    (outcome,) = results(client)
    assert bench.is_right(outcome)
    assert process_of(client).pid != stopped
    client.attend()
    assert looked == [True]
    assert f"killing process {stopped}" in capfd.readouterr().err


def test_cancelling_a_hanging_request_frees_its_thread(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """The only thread becomes free for other requests, even if the store never answers."""
    here, away, _ = (adapter.digest for adapter in bench.adapters)
    staged(bench.open(), here).release()
    with socket.create_server(("127.0.0.1", 0)) as silent:
        silent.settimeout(60)
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{silent.getsockname()[1]}")
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "x")
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "x")
        client = bench.open(blob_url="s3://silent", num_threads=1)
        client.request(away)
        client.request(here)
        with silent.accept()[0]:
            assert client.poll() == []
            client.cancel(away)
            (found,) = results(client)
            assert found.digest == here
            assert bench.is_right(found)
            wait_until(lambda: not (client.poll() or client._asked))
            assert client.counts().num_given_up == 1


def test_process_waiting_for_the_blob_store_is_not_killed(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{silent.getsockname()[1]}")
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "x")
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "x")
        client = bench.open(blob_url="s3://silent")
        process = process_of(client)
        client.request(bench.adapters[0].digest)
        for _ in range(5):
            bench.now_s += SILENCE_S
            # The process is pinged and gets as much time as it needs to answer.
            wait_until(lambda: not client.poll() and heard_s(client) == bench.now_s)
        assert process_of(client) is process


def test_process_exits_with_its_engine(bench: Bench) -> None:
    client = bench.open()
    process = process_of(client)
    client.close()
    assert process.poll() == 0
    assert client.fileno() == -1


def test_look_reports_the_contents_of_the_disk_tier(bench: Bench) -> None:
    client = bench.open()
    assert [one.tier for one in client.contents()] == ["host"]
    held = [staged(client, adapter.digest) for adapter in bench.adapters]
    looked = threading.Event()
    client.look(looked.set)

    def has_looked() -> bool:
        assert client.poll() == []
        client.attend()
        return looked.is_set()

    wait_until(has_looked)
    host, disk = client.contents()
    assert (host.tier, disk.tier) == ("host", "disk")
    assert [one.digest for one in disk.adapters] == [one.digest for one in reversed(held)]
    looked.clear()
    stop(client)
    client.look(looked.set)
    kill(client)
    wait_until(has_looked)
    looked.clear()
    client.look(looked.set)
    wait_until(has_looked)
    assert len(client.contents()[1].adapters) == 3


@pytest.mark.parametrize("blob_url", ["ftp://somewhere", "s3://"])
def test_invalid_blob_url_is_refused_by_name(bench: Bench, blob_url: str) -> None:
    client = bench.start(blob_url=blob_url)
    with pytest.raises(StagingRefused, match=r"use .*s3://BUCKET"):
        client.open(60)


def test_process_that_never_opens_times_out(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staging_link, "COMMAND", ("/bin/sh", "-c", "sleep 20 #"))
    # A process that has opened no tier has nothing to finish, so `close` does not wait for it.
    monkeypatch.setattr(staging_link, "END_GRACE_S", 60)
    client = bench.start()
    with pytest.raises(StagingRefused, match="did not start"):
        client.open(0.2)
    process = process_of(client)
    client.close()
    assert process.poll() == -signal.SIGKILL


def test_refusal_without_an_engine_is_silent(bench: Bench, capfd: pytest.CaptureFixture[str]) -> None:
    client = bench.start(blob_url="ftp://somewhere")
    process, link = process_of(client), client._link
    assert link is not None
    client._configure(link)
    link._end.close()
    assert process.wait(30) == 0
    assert capfd.readouterr().err == ""


SHORT_TABLES = """
import runpy
from loramux.adapter_store.tiers import staging_messages
staging_messages.MAX_TABLE_BYTES = 8
runpy.run_module("loramux.adapter_store.tiers.staging_process", run_name="__main__", alter_sys=True)
"""


def test_tables_too_long_for_a_packet_follow_the_pages(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tables of thousands of experts can be longer than a packet. The pages then lie outside the shared memory."""
    monkeypatch.setattr(staging_link, "COMMAND", (sys.executable, "-c", SHORT_TABLES))
    client = bench.open()
    for adapter in bench.adapters:
        assert bench.is_right(staged(client, adapter.digest))
