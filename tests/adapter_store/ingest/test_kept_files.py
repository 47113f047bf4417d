from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from loramux.adapter_store.ingest.kept_files import KeptFiles
from tests.adapter_store.ingest.ingest_world import IngestWorld


@pytest.fixture
def kept(tmp_path: Path) -> KeptFiles:
    return KeptFiles(tmp_path, max_bytes=100)


def received(directory: Path, num_bytes: int) -> Path:
    path = directory / "received"
    path.write_bytes(b"x" * num_bytes)
    return path


def test_a_kept_file_is_taken_once(kept: KeptFiles, tmp_path: Path) -> None:
    kept.keep("upl_1", "a", received(tmp_path, 60))
    assert kept.has("upl_1", "a")
    assert not kept.has("upl_1", "b")
    assert kept.take("upl_1", "a", tmp_path / "taken")
    assert (tmp_path / "taken").stat().st_size == 60
    assert not kept.take("upl_1", "a", tmp_path / "again")
    assert not list(tmp_path.glob("kept-*"))


def test_the_oldest_files_make_room(kept: KeptFiles, tmp_path: Path) -> None:
    for name, num_bytes in (("a", 60), ("b", 40), ("a", 60), ("c", 40), ("d", 101)):
        kept.keep("upl_1", name, received(tmp_path, num_bytes))
    assert [name for name in "abcd" if kept.has("upl_1", name)] == ["a", "c"], "b is oldest, and d is too large"
    assert len(list(tmp_path.glob("kept-*"))) == 2


def test_the_files_of_one_upload_are_forgotten(kept: KeptFiles, tmp_path: Path) -> None:
    for upload_id in ("upl_1", "upl_2"):
        kept.keep(upload_id, "a", received(tmp_path, 10))
    kept.forget("upl_1")
    assert (kept.has("upl_1", "a"), kept.has("upl_2", "a")) == (False, True)
    assert len(list(tmp_path.glob("kept-*"))) == 1


@pytest.mark.parametrize("migrated_url", ["sqlite"], indirect=True)
def test_received_files_are_not_fetched_again(
    world: IngestWorld, make_adapter: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unwanted(*arguments: object) -> None:
        raise AssertionError("the blob store was asked for a file that this server has received")

    with monkeypatch.context() as patched:
        patched.setattr(world.blobs, "get", unwanted)
        patched.setattr(world.blobs, "head", unwanted)
        version = world.push(make_adapter())
    assert version.state == "ready"
    world.assert_nothing_left_over(version)


@pytest.mark.parametrize("migrated_url", ["sqlite"], indirect=True)
@pytest.mark.parametrize("end", ["cancelled", "validated elsewhere"])
def test_the_files_of_an_ended_upload_are_deleted(world: IngestWorld, make_adapter: Any, end: str) -> None:
    files = make_adapter()
    upload = world.upload(files.config_bytes, files.tensor_bytes)
    assert len(list(world.scratch.glob("kept-*"))) == 2
    if end == "cancelled":
        world.ingest.cancel_upload(world.adapter_id, upload.id)
    else:
        version = world.ingest.create_version(world.adapter_id, upload.id)
        assert world.another(world.scratch.with_name("other")).process(version.id).state == "ready"
        world.ingest.remove_abandoned()
    assert not list(world.scratch.glob("kept-*"))
