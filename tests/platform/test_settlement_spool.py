"""What the spool acknowledged survives crashes, torn lines, damage and a full disk."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from loramux.platform import settlement_spool
from loramux.platform.reservations import Closing, Settlement
from loramux.platform.settlement_spool import CURRENT, REFUSED, SettlementSpool, SpoolFull


def closing(number: int) -> Closing:
    settlement = Settlement(status="completed", prompt_tokens=number, completion_tokens=3, first_token_us=9)
    return Closing(request_id=f"req_{number}", settlement=settlement)


def open_spool(directory: Path, max_bytes: int = 1 << 20) -> SettlementSpool:
    return SettlementSpool(directory / "spool", max_bytes)


def test_what_was_appended_is_there_after_a_restart_and_gone_after_its_replay(tmp_path: Path) -> None:
    for number in range(3):
        open_spool(tmp_path).append(closing(number))
    spool = open_spool(tmp_path)
    assert spool.num_bytes > 0
    assert spool.begin_replay().closings == tuple(closing(number) for number in range(3))
    # What comes meanwhile waits for the next replay; an unfinished one begins again, even in another process.
    spool.append(closing(7))
    spool = open_spool(tmp_path)
    assert len(spool.begin_replay().closings) == 3
    spool.end_replay()
    assert spool.begin_replay().closings == (closing(7),)
    spool.end_replay()
    assert spool.num_bytes == 0
    assert spool.begin_replay().closings == ()
    assert list((tmp_path / "spool").iterdir()) == []


@pytest.mark.parametrize("num_left", [1, 9, 40], ids=["its first byte", "its checksum", "half of it"])
def test_a_torn_last_line_is_forgotten_and_the_next_is_whole(tmp_path: Path, num_left: int) -> None:
    spool = open_spool(tmp_path)
    spool.append(closing(1))
    whole = spool.num_bytes
    spool.append(closing(2))
    os.truncate(tmp_path / "spool" / CURRENT, whole + num_left)
    spool = open_spool(tmp_path)
    assert spool.num_bytes == whole
    spool.append(closing(3))
    assert spool.begin_replay().closings == (closing(1), closing(3))


def test_a_damaged_record_is_kept_aside_and_the_others_are_replayed(tmp_path: Path) -> None:
    spool = open_spool(tmp_path)
    for number in range(3):
        spool.append(closing(number))
    path = tmp_path / "spool" / CURRENT
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
    assert b"req_2" in kept
    assert spool.num_bytes == 0


def test_it_takes_no_more_than_it_may(tmp_path: Path) -> None:
    spool = open_spool(tmp_path, max_bytes=700)
    for number in range(3):
        spool.append(closing(number))
    with pytest.raises(SpoolFull):
        spool.append(closing(3))
    assert 0 < spool.num_bytes <= 700
    assert len(spool.begin_replay().closings) == 3
    spool.end_replay()
    spool.append(closing(9))


def test_a_disk_that_is_full_leaves_no_half_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spool = open_spool(tmp_path)
    spool.append(closing(1))

    def half(file: int, data: bytes) -> None:
        os.write(file, data[:20])
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(settlement_spool, "_write_all", half)
        with pytest.raises(OSError, match="No space"):
            spool.append(closing(2))
    spool.append(closing(3))
    assert spool.begin_replay().closings == (closing(1), closing(3))
