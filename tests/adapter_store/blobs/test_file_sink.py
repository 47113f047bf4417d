from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from loramux.adapter_store.blobs.s3_reading import FileSink


@pytest.mark.parametrize(
    ("number", "is_raised"), [(errno.EOPNOTSUPP, False), (errno.ENOSPC, True)], ids=["not supported", "disk full"]
)
def test_a_file_is_allocated_if_its_file_system_can(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, number: int, is_raised: bool
) -> None:
    def fail(*arguments: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "posix_fallocate", fail)
    with FileSink(tmp_path / "file") as sink:
        if is_raised:
            with pytest.raises(OSError, match="No space left"):
                sink.resize(7)
        else:
            sink.resize(7)
            sink.write(3, b"abcd")
    assert (tmp_path / "file").stat().st_size == 7
