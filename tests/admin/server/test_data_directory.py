from __future__ import annotations

import stat
from pathlib import Path

import pytest

from loramux.admin.doctor.checks import check_data_directory
from loramux.admin.doctor.findings import Grade
from loramux.admin.server.data_directory import DataDirectory, make_private, open_data_directory


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.mark.parametrize("content", [(), ("lock", "loramux.db", "loramux.db-wal", "blobs"), ("lost+found",)])
def test_existing_data_directory_gets_the_mode_that_the_doctor_demands(
    tmp_path: Path, content: tuple[str, ...]
) -> None:
    root = tmp_path / "data"
    root.mkdir(mode=0o755)
    for name in content:
        (root / name).mkdir() if name == "blobs" else (root / name).write_bytes(b"")
    root.chmod(0o755)
    assert check_data_directory(root).grade is Grade.WARNING
    with open_data_directory(root):
        assert check_data_directory(root).grade is Grade.OK
    # A second start finds only its own files.
    root.chmod(0o750)
    with open_data_directory(root) as directory:
        assert (mode_of(root), directory) == (0o700, DataDirectory(root))


def test_mode_of_a_directory_with_other_content_stays(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    tmp_path.chmod(0o755)
    make_private(tmp_path)
    assert mode_of(tmp_path) == 0o755


def test_new_data_directory_is_private(tmp_path: Path) -> None:
    make_private(tmp_path / "a" / "b")
    assert mode_of(tmp_path / "a" / "b") == 0o700
