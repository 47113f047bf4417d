from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from loramux.platform.admission.records import Closing
from loramux.platform.generation import settlement_spool
from loramux.platform.generation.settlement_spool import CURRENT, LEFT, REFUSED, SettlementSpool, SpoolFull, record_of
from loramux.platform.ledger.settlement import Settlement


def closing(number: int) -> Closing:
    settlement = Settlement(status="completed", prompt_tokens=number, completion_tokens=3, first_token_us=9)
    return Closing(request_id=f"req_{number}", settlement=settlement)


def open_spool(directory: Path, max_bytes: int = 1 << 20) -> SettlementSpool:
    return SettlementSpool(directory / "spool", max_bytes)


def current(directory: Path) -> Path:
    return directory / "spool" / CURRENT


def test_records_survive_a_restart_and_vanish_after_a_replay(tmp_path: Path) -> None:
    for number in range(3):
        open_spool(tmp_path).append(closing(number))
    spool = open_spool(tmp_path)
    assert spool.num_bytes > 0
    assert spool.begin_replay().closings == tuple(closing(number) for number in range(3))
    # An unfinished replay starts over, even in another process, and includes records added in the meantime.
    spool.append(closing(7))
    spool = open_spool(tmp_path)
    assert len(spool.begin_replay().closings) == 4
    spool.append(closing(8))
    spool.end_replay()
    assert spool.begin_replay().closings == (closing(8),), "entries added during a replay wait for the next"
    spool.end_replay()
    assert spool.num_bytes == 0
    assert spool.begin_replay().closings == ()
    assert set(current(tmp_path).read_bytes()) == {0}
    spool.append(closing(9))
    assert open_spool(tmp_path).begin_replay().closings == (closing(9),)


def test_space_is_preallocated_also_after_a_replay(tmp_path: Path) -> None:
    spool = open_spool(tmp_path)
    for _ in range(2):
        assert current(tmp_path).stat().st_blocks * 512 >= 1 << 20
        spool.append(closing(1))
        spool.begin_replay()
        spool.end_replay()


def test_replay_shrinks_the_file_to_its_first_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settlement_spool, "ALLOCATED_BYTES", 1 << 12)
    spool = open_spool(tmp_path)
    for number in range(60):
        spool.append(closing(number))
    assert current(tmp_path).stat().st_size == 3 << 12
    assert len(spool.begin_replay().closings) == 60
    spool.end_replay()
    assert current(tmp_path).read_bytes() == bytes(1 << 12)
    for number in range(60):
        spool.append(closing(number))
    assert len(open_spool(tmp_path).begin_replay().closings) == 60


def test_files_of_an_earlier_version_are_replayed(tmp_path: Path) -> None:
    (tmp_path / "spool").mkdir()
    current(tmp_path).write_bytes(record_of(closing(2)) + record_of(closing(3)) + record_of(closing(4))[:50])
    (tmp_path / "spool" / LEFT).write_bytes(record_of(closing(0)) + record_of(closing(1)).rstrip())
    spool = open_spool(tmp_path)
    assert spool.num_bytes > 0
    assert spool.begin_replay().closings == tuple(closing(number) for number in range(4))
    spool.end_replay()
    assert spool.num_bytes == 0
    assert [path.name for path in (tmp_path / "spool").iterdir()] == [CURRENT]


def test_crash_while_emptying_the_file_leaves_nothing_to_replay(tmp_path: Path) -> None:
    spool = open_spool(tmp_path)
    for number in range(3):
        spool.append(closing(number))
    data = current(tmp_path).read_bytes()
    current(tmp_path).write_bytes(b"\0" + data[1:])
    spool = open_spool(tmp_path)
    assert spool.num_bytes == 0
    assert set(current(tmp_path).read_bytes()) == {0}


@pytest.mark.parametrize("is_first_lost", [True, False], ids=["its second half", "its first half"])
def test_half_written_record_is_dropped(tmp_path: Path, is_first_lost: bool) -> None:
    spool = open_spool(tmp_path)
    spool.append(closing(1))
    whole = spool.num_bytes
    line = record_of(closing(2))
    lost = bytes(len(line) // 2)
    torn = lost + line[len(lost) :] if is_first_lost else line[: -len(lost)] + lost
    data = current(tmp_path).read_bytes()
    current(tmp_path).write_bytes(data[:whole] + torn + data[whole + len(torn) :])
    spool = open_spool(tmp_path)
    assert spool.num_bytes == whole
    contents = spool.begin_replay()
    assert (contents.closings, contents.num_damaged) == ((closing(1),), 0)


def test_spool_works_without_preallocation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unsupported(*_: object) -> None:
        raise OSError(errno.EOPNOTSUPP, "Operation not supported")

    monkeypatch.setattr(os, "posix_fallocate", unsupported)
    with capture_logs() as logged:
        spool = open_spool(tmp_path)
        spool.append(closing(1))
        spool.append(closing(2))
    assert len(logged) == 1
    assert open_spool(tmp_path).begin_replay().closings == (closing(1), closing(2))


@pytest.mark.parametrize("num_left", [1, 9, 40], ids=["its first byte", "its checksum", "half of it"])
def test_torn_last_line_is_dropped_and_the_next_record_is_intact(tmp_path: Path, num_left: int) -> None:
    spool = open_spool(tmp_path)
    spool.append(closing(1))
    whole = spool.num_bytes
    spool.append(closing(2))
    os.truncate(current(tmp_path), whole + num_left)
    spool = open_spool(tmp_path)
    assert spool.num_bytes == whole
    spool.append(closing(3))
    assert spool.begin_replay().closings == (closing(1), closing(3))


def test_damaged_record_is_set_aside_and_the_others_are_replayed(tmp_path: Path) -> None:
    spool = open_spool(tmp_path)
    for number in range(3):
        spool.append(closing(number))
    path = current(tmp_path)
    lines = path.read_bytes().split(b"\n")
    lines[1] = lines[1].replace(b'"completion_tokens":3', b'"completion_tokens":4')
    path.write_bytes(b"\n".join(lines))
    spool = open_spool(tmp_path)
    contents = spool.begin_replay()
    assert contents.closings == (closing(0), closing(2))
    assert contents.num_damaged == 1
    spool.end_replay(refused=[closing(2)])
    kept = (tmp_path / "spool" / REFUSED).read_bytes()
    assert b'"completion_tokens":4' in kept
    assert spool.num_bytes == 0
    # An operator can have the refused record replayed as it is.
    (tmp_path / "spool" / LEFT).write_bytes(kept.splitlines()[0])
    assert open_spool(tmp_path).begin_replay().closings == (closing(2),)


def test_spool_refuses_records_over_its_limit(tmp_path: Path) -> None:
    spool = open_spool(tmp_path, max_bytes=700)
    for number in range(3):
        spool.append(closing(number))
    with pytest.raises(SpoolFull):
        spool.append(closing(3))
    assert 0 < spool.num_bytes <= 700
    assert len(spool.begin_replay().closings) == 3
    spool.end_replay()
    spool.append(closing(9))


def test_full_disk_leaves_no_partial_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spool = open_spool(tmp_path)
    spool.append(closing(1))

    def half(file: int, data: bytes, offset: int) -> None:
        os.pwrite(file, data[:20], offset)
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(settlement_spool, "_write_all", half)
        with pytest.raises(OSError, match="No space"):
            spool.append(closing(2))
    spool.append(closing(3))
    assert spool.begin_replay().closings == (closing(1), closing(3))
