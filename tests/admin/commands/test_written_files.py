from __future__ import annotations

from pathlib import Path

import pytest

from loramux.admin.commands.written_files import check_writable


def test_check_leaves_files_as_they_are(tmp_path: Path) -> None:
    present, link = tmp_path / "present", tmp_path / "link"
    present.write_text("earlier")
    link.symlink_to(present)
    for path in (present, link, tmp_path / "new", Path("/dev/null")):
        check_writable(path)
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {"present": "earlier", "link": "earlier"}


@pytest.mark.parametrize("name", ["none/file", "", "x" * 300])
def test_what_cannot_be_written_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(OSError, match="Errno"):
        check_writable(tmp_path / name)
