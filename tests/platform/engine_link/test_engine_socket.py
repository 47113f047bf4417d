from __future__ import annotations

import tempfile
from pathlib import Path

import pytest

from loramux.platform.engine_link import engine_socket
from loramux.platform.engine_link.engine_socket import EngineSocketDirectory, SocketUnusable


@pytest.fixture
def temporary(short_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(short_path))
    return short_path


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def test_preferred_directory_is_private_and_reused(short_path: Path) -> None:
    preferred = short_path / "data" / "run"
    first = EngineSocketDirectory(preferred)
    assert preferred.stat().st_mode & 0o777 == 0o700
    with pytest.raises(SocketUnusable, match="another server"):
        EngineSocketDirectory(preferred)
    first.path.touch()
    first.close()
    first.close()
    again = EngineSocketDirectory(preferred)
    assert again.path == first.path
    assert not again.path.exists()
    again.close()


def test_too_long_path_falls_back_to_a_temporary_directory(temporary: Path) -> None:
    directory = EngineSocketDirectory(temporary / ("deep" * 30))
    assert directory.path.parent.parent == temporary
    assert directory.path.parent.stat().st_mode & 0o777 == 0o700
    directory.close()
    assert names(temporary) == []


def test_only_directories_of_dead_owners_are_removed(temporary: Path) -> None:
    dead = temporary / f"{engine_socket.TEMPORARY_PREFIX}dead"
    dead.mkdir()
    for name in ("lock", "engine.sock"):
        (dead / name).touch()
    (temporary / f"{engine_socket.TEMPORARY_PREFIX}being-made").mkdir()
    (temporary / f"{engine_socket.TEMPORARY_PREFIX}link").symlink_to(temporary / "elsewhere")
    (temporary / "loramux-something-else").mkdir()
    living = EngineSocketDirectory()
    second = EngineSocketDirectory()
    assert not dead.exists()
    assert living.path.parent.exists()
    living.close()
    second.close()
    assert names(temporary) == [
        f"{engine_socket.TEMPORARY_PREFIX}being-made",
        f"{engine_socket.TEMPORARY_PREFIX}link",
        "loramux-something-else",
    ]
