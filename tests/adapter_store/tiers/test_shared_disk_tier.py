from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from loramux.adapter_store.directory_lock import DirectoryBusy, DirectoryLock
from loramux.adapter_store.tiers import disk_tier
from loramux.adapter_store.tiers.disk_tier import DiskTier, purge_files
from tests.adapter_store.open_files import open_files
from tests.adapter_store.tiers.disk_tier_process import PACK_KEY, digest_of, put

PROGRAM = Path(__file__).parent / "disk_tier_process.py"
ROOT = Path(__file__).parents[3]
A, B, C, D = (digest_of(number) for number in range(4))


class Engine:
    def __init__(self, directory: Path, max_bytes: int) -> None:
        environment = {**os.environ, "PYTHONPATH": f"{ROOT / '.src'}{os.pathsep}{ROOT}"}
        self.process = subprocess.Popen(
            [sys.executable, str(PROGRAM), str(directory), str(max_bytes)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )
        assert self.answer() == "ready"

    def __call__(self, *words: object) -> str:
        self.say(*words)
        return self.answer()

    def say(self, *words: object) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(" ".join(map(str, words)) + "\n")
        self.process.stdin.flush()

    def answer(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def kill(self) -> None:
        self.process.kill()
        self.end()

    def end(self) -> None:
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            pipe.close()
        self.process.wait(20)


Start = Callable[[int], Engine]


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    directory = tmp_path / "disk"
    directory.mkdir()
    return directory


@pytest.fixture
def start(directory: Path) -> Iterator[Start]:
    engines = []

    def start(max_bytes: int) -> Engine:
        engines.append(Engine(directory, max_bytes))
        return engines[-1]

    yield start
    for engine in engines:
        if engine.process.poll() is None:
            engine.end()


def files(directory: Path) -> dict[str, int]:
    return {path.stem: path.stat().st_size for path in directory.glob("*/*.packed")}


def unfinished(directory: Path) -> list[Path]:
    return list((directory / "unfinished").iterdir())


def test_files_added_by_another_engine_are_found_counted_and_evicted(directory: Path, start: Start) -> None:
    tier, other = DiskTier(directory, 250, PACK_KEY), start(250)
    put(tier, A, 100)
    assert other("hold", A) == "100"
    other("close")
    other("add", B, 100)
    held = tier.hold(B)
    assert held is not None
    with held:
        assert len(os.read(held.descriptor, 1 << 20)) == 100
    # The other engine used `A` before `B` was added, and this engine used `B` later. Only a rescan reveals this order.
    put(tier, C, 100)
    assert (files(directory), tier.used_bytes) == ({B: 100, C: 100}, 200)
    assert other("hold", A) == "none"
    other("add", A, 100)
    assert files(directory) == {C: 100, A: 100}


def test_file_is_closed_if_its_use_cannot_be_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tier = DiskTier(tmp_path, 1000, PACK_KEY)
    file = tier.new_file()
    file.write_bytes(bytes(100))
    tier.add(A, file)

    def refused(*arguments: object, **options: object) -> None:
        raise PermissionError

    before = open_files(str(tmp_path))
    monkeypatch.setattr(os, "utime", refused)
    with pytest.raises(PermissionError):
        tier.hold(A)
    assert open_files(str(tmp_path)) == before


def test_use_by_another_engine_affects_eviction_order(directory: Path, start: Start) -> None:
    tier, other = DiskTier(directory, 250, PACK_KEY), start(250)
    put(tier, A, 100)
    put(tier, B, 100)
    # The other engine adds and removes no file. Only the file's timestamp shows that it used A.
    assert other("hold", A) == "100"
    other("close")
    put(tier, C, 100)
    assert files(directory) == {A: 100, C: 100}


def test_file_in_use_by_another_engine_is_not_evicted(directory: Path, start: Start) -> None:
    tier, other = DiskTier(directory, 250, PACK_KEY), start(250)
    put(tier, A, 100)
    assert other("hold", A) == "100"
    for digest in (B, C, D):
        put(tier, digest, 100)
    assert files(directory) == {A: 100, D: 100}
    put(tier, B, 200)
    assert files(directory) == {A: 100}, "there is no room, so it is not kept"
    assert other("hold", A) == "100"
    other.kill()
    put(tier, B, 200)
    assert files(directory) == {B: 200}, "dead processes hold nothing"


def test_only_dead_engines_unfinished_files_are_removed(
    directory: Path, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier, dying, living = DiskTier(directory, 1000, PACK_KEY), start(1000), start(1000)
    dying("begin")
    living("begin")
    own = tier.new_file()
    own.write_bytes(b"half of ours")
    assert len(unfinished(directory)) == 3
    dying.kill()
    put(tier, A, 100)
    assert len(unfinished(directory)) == 3, "the scan runs once a minute"
    later = time.monotonic() + 61
    monkeypatch.setattr(disk_tier.time, "monotonic", lambda: later)  # type: ignore[attr-defined]
    put(tier, B, 100)
    assert len(unfinished(directory)) == 2
    assert own.exists()
    living.kill()
    DiskTier(directory, 1000, PACK_KEY)
    assert unfinished(directory) == [own], "a new process scans immediately"
    assert len(list((directory / "runs").iterdir())) <= 2


def test_held_lock_blocks_adding_but_not_reading(directory: Path, start: Start) -> None:
    tier, other = DiskTier(directory, 1000, PACK_KEY), start(1000)
    put(tier, A, 100)
    assert other("lock") == "done"
    lock = DirectoryLock(directory / "lock", patience_s=0.05)
    with pytest.raises(DirectoryBusy), lock.hold():
        pass
    held = tier.hold(A)
    assert held is not None
    with held:
        assert len(os.read(held.descriptor, 1 << 20)) == 100
    other.kill()
    with lock.hold():
        assert lock.num_changes > 0


def test_random_engine_operations_and_deaths_give_no_wrong_bytes(directory: Path, start: Start) -> None:
    max_bytes, num_turns = 120_000, 2000
    tier = DiskTier(directory, max_bytes, PACK_KEY)
    engines, dying = [start(max_bytes) for _ in range(2)], start(max_bytes)
    largest = 0
    is_over = threading.Event()

    def watch() -> None:
        nonlocal largest
        # The last scan begins after the last change, so even a thread that never gets its turn sees files.
        has_ended = False
        while not has_ended:
            has_ended = is_over.wait(0.002)
            seen = 0
            for path in directory.glob("*/*.packed"):
                try:
                    seen += path.stat().st_size
                except FileNotFoundError:
                    continue
            largest = max(largest, seen)

    watcher = threading.Thread(target=watch)
    watcher.start()
    for seed, engine in enumerate([*engines, dying]):
        engine.say("churn", seed, num_turns)
    time.sleep(0.1)
    dying.kill()
    answers = [engine.answer() for engine in engines]
    is_over.set()
    watcher.join()
    for answer in answers:
        num_read, num_missed = map(int, answer.split())
        assert num_read + num_missed == num_turns
        assert min(num_read, num_missed) > num_turns // 10
    # One file may be removed and another added during a scan. At worst, the scan counts both.
    assert 0 < largest <= max_bytes + 2 * 40_000
    assert sum(files(directory).values()) <= max_bytes
    tier = DiskTier(directory, max_bytes, PACK_KEY)
    assert tier.used_bytes == sum(files(directory).values())
    assert unfinished(directory) == []


def test_smaller_limit_of_a_new_engine_is_applied(directory: Path, start: Start) -> None:
    tier = DiskTier(directory, 1000, PACK_KEY)
    for digest in (A, B, C):
        put(tier, digest, 100)
    start(150)
    assert files(directory) == {C: 100}
    put(tier, D, 900)
    assert files(directory) == {C: 100, D: 900}


def test_file_replaced_by_another_engine_is_not_set_aside(directory: Path, start: Start) -> None:
    tier, other = DiskTier(directory, 1000, PACK_KEY), start(1000)
    put(tier, A, 100)
    wrong = (directory / PACK_KEY / f"{A}.packed").stat().st_ino
    other("add", A, 100)
    tier.forget(A, wrong)
    assert files(directory) == {A: 100}
    tier.forget(A, (directory / PACK_KEY / f"{A}.packed").stat().st_ino)
    assert (files(directory), tier.used_bytes) == ({}, 0)
    assert len(list((directory / "set_aside").iterdir())) == 1


def test_failed_change_leaves_a_correct_count(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tier = DiskTier(directory, 1000, PACK_KEY)
    put(tier, A, 100)

    def fail(source: Path, destination: Path) -> None:
        raise OSError("the disk is gone")

    with monkeypatch.context() as patched:
        patched.setattr(disk_tier.os, "replace", fail)  # type: ignore[attr-defined]
        with pytest.raises(OSError, match="gone"):
            put(tier, A, 300)
    put(tier, B, 100)
    assert tier.used_bytes == sum(files(directory).values()) == 200


def test_purged_files_are_gone_for_every_engine_and_target(directory: Path, start: Start) -> None:
    tier, other = DiskTier(directory, 250, PACK_KEY), start(250)
    second = DiskTier(directory, 250, "another")
    for one, digest in ((tier, A), (second, A), (tier, B)):
        put(one, digest, 50)
    corrupt = tier.new_file()
    corrupt.write_bytes(b"whose bytes are these?")
    tier.set_aside(corrupt)
    held = tier.hold(A)
    assert held is not None
    with held:
        purge_files(directory, {A})
        assert len(os.read(held.descriptor, 1 << 20)) == 50, "a reader finishes"
    assert (tier.hold(A), second.hold(A), other("hold", A)) == (None, None, "none")
    assert files(directory) == {B: 50}
    assert list((directory / "set_aside").iterdir()) == []
    put(tier, C, 150)
    assert (tier.used_bytes, files(directory)) == (200, {B: 50, C: 150}), "the purged bytes no longer count"
    purge_files(directory / "missing", {A})


def test_a_purge_of_what_another_engine_has_purged_changes_nothing(directory: Path) -> None:
    tier, changes = DiskTier(directory, 250, PACK_KEY), DirectoryLock(directory / "lock")
    put(tier, A, 50)
    tier.purge(A)
    with changes.hold():
        num_changes = changes.num_changes
    tier.purge(A)
    with changes.hold():
        assert (changes.num_changes, files(directory)) == (num_changes, {})
