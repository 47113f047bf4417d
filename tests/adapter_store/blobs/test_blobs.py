from __future__ import annotations

import hashlib
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from loramux.adapter_store.blobs.blob_url import open_blob_store
from loramux.adapter_store.blobs.interface import BlobStore
from loramux.adapter_store.blobs.local import LocalBlobStore
from loramux.adapter_store.blobs.s3_limits import MIN_PART_BYTES
from loramux.adapter_store.errors import BlobNotFound, BlobStoreUnavailable, BlobTooLarge, InvalidBlobUrl

LARGE = 2 * MIN_PART_BYTES
"""A size in bytes that the S3 store under test uploads in several parts."""


def test_blob_is_read_back_unchanged(blobs: BlobStore, tmp_path: Path) -> None:
    blobs.check()
    source, copy = tmp_path / "source", tmp_path / "copy"
    source.write_bytes(bytes(range(256)) * 9000)
    assert blobs.put("adapters/a.safetensors", source)
    assert blobs.put("packed/d/k", b"")
    blobs.get("adapters/a.safetensors", copy)
    assert copy.read_bytes() == source.read_bytes()
    assert blobs.read_bytes("packed/d/k") == b""
    assert blobs.exists("packed/d/k")


def test_a_blob_is_never_replaced(blobs: BlobStore, tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.write_bytes(b"second")
    assert blobs.put("k/one", b"first")
    assert not blobs.put("k/one", b"second")
    assert not blobs.put("k/one", source)
    assert blobs.read_bytes("k/one") == b"first"


def test_deleted_blob_can_be_put_again(blobs: BlobStore) -> None:
    blobs.put("k/one", b"1")
    blobs.delete("k/one")
    blobs.delete("k/one")
    assert not blobs.exists("k/one")
    assert blobs.put("k/one", b"2")


def test_missing_blob_raises_blob_not_found(blobs: BlobStore, tmp_path: Path) -> None:
    assert not blobs.exists("k/none")
    with pytest.raises(BlobNotFound):
        blobs.read_bytes("k/none")
    with pytest.raises(BlobNotFound):
        blobs.get("k/none", tmp_path / "copy")


def test_keys_are_listed_by_prefix_in_order(blobs: BlobStore) -> None:
    for key in ("uploads/u2/b", "uploads/u1/a", "uploads/u1/b", "packed/x/y", "uploads2/z"):
        blobs.put(key, b"1")
    assert list(blobs.list_keys("uploads/")) == ["uploads/u1/a", "uploads/u1/b", "uploads/u2/b"]
    assert list(blobs.list_keys("uploads/u1")) == ["uploads/u1/a", "uploads/u1/b"]
    assert len(list(blobs.list_keys())) == 5
    assert list(blobs.list_keys("nothing/")) == []


HOSTILE_KEYS = {
    "empty": "",
    "absolute": "/etc/passwd",
    "above": "../x",
    "above-inside": "a/../b",
    "empty-part": "a//b",
    "trailing-slash": "a/",
    "hidden": ".hidden",
    "space": "a b",
    "non-ascii": "ä",
    "nul": "a\0",
    "newline": "a\n",
    "query": "a?versionId=1",
    "percent": "a%2e%2e%2fb",
    "backslash": "a\\b",
    "too-deep": "/".join("abcdefghi"),
    "too-long": "a" * 129,
}


def is_refused_as_key(call: Callable[[str], object], key: str) -> bool:
    try:
        call(key)
    except ValueError as error:
        return "invalid blob key" in str(error)
    return False


def test_invalid_key_is_refused(blobs: BlobStore, tmp_path: Path) -> None:
    calls: dict[str, Callable[[str], object]] = {
        "exists": blobs.exists,
        "head": blobs.head,
        "read_bytes": blobs.read_bytes,
        "delete": blobs.delete,
        "put": lambda key: blobs.put(key, b"1"),
        "get": lambda key: blobs.get(key, tmp_path / "copy"),
    }
    taken = [
        f"{name}: {kind}"
        for kind, key in HOSTILE_KEYS.items()
        for name, call in calls.items()
        if not is_refused_as_key(call, key)
    ]
    assert taken == []
    assert not (tmp_path / "copy").exists()
    assert list(blobs.list_keys()) == []


@pytest.mark.parametrize("size", [0, 1, LARGE, LARGE + 1], ids=["empty", "one-byte", "two-parts", "three-parts"])
def test_blobs_of_any_size_are_read_back(blobs: BlobStore, tmp_path: Path, size: int) -> None:
    source, copy = tmp_path / "source", tmp_path / "copy"
    source.write_bytes(random.Random(size).randbytes(size))
    assert blobs.put("k/sized", source)
    copy.write_bytes(b"what was there before" * 1000)
    blobs.get("k/sized", copy)
    assert copy.read_bytes() == source.read_bytes()
    assert blobs.read_bytes("k/sized") == source.read_bytes()
    info = blobs.head("k/sized")
    assert info is not None
    assert info.size == size
    assert info.sha256 in (None, hashlib.sha256(source.read_bytes()).hexdigest())


def test_head_of_a_missing_blob_returns_none(blobs: BlobStore) -> None:
    assert blobs.head("k/none") is None


def test_get_stops_at_max_bytes(blobs: BlobStore, tmp_path: Path) -> None:
    blobs.put("k/ten", b"0123456789")
    blobs.get("k/ten", tmp_path / "copy", max_bytes=10)
    assert (tmp_path / "copy").read_bytes() == b"0123456789"
    with pytest.raises(BlobTooLarge):
        blobs.get("k/ten", tmp_path / "other", max_bytes=9)
    other = tmp_path / "other"
    assert not other.exists() or other.stat().st_size == 0


def test_unreadable_source_leaves_no_blob(blobs: BlobStore, tmp_path: Path) -> None:
    with pytest.raises((OSError, BlobStoreUnavailable)):
        blobs.put("k/one", tmp_path / "no such file")
    assert list(blobs.list_keys()) == []
    assert blobs.put("k/one", b"1")


def test_cleanup_keeps_all_blobs(blobs: BlobStore) -> None:
    blobs.put("k/one", b"1")
    blobs.remove_unfinished()
    assert list(blobs.list_keys()) == ["k/one"]


def test_check_leaves_nothing_behind(blobs: BlobStore) -> None:
    blobs.check()
    assert list(blobs.list_keys()) == []


def test_unknown_multipart_upload_cannot_be_completed(blobs: BlobStore) -> None:
    blobs.abort_parts("k/one", "no-such-upload")
    with pytest.raises(BlobNotFound):
        blobs.complete_parts("k/one", "no-such-upload", 10)


def test_exactly_one_of_many_writers_wins(blobs: BlobStore) -> None:
    won = []

    def write(number: int) -> None:
        if blobs.put("k/contended", b"%d" % number):
            won.append(number)

    threads = [threading.Thread(target=write, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(won) == 1
    assert blobs.read_bytes("k/contended") == b"%d" % won[0]


def test_a_local_store_leaves_nothing_behind(tmp_path: Path) -> None:
    root = tmp_path / "blobs"
    blobs = LocalBlobStore(root)
    blobs.put("uploads/u/a", b"1")
    with pytest.raises(BlobStoreUnavailable):
        blobs.put("uploads/u/b", tmp_path / "no such file")
    blobs.delete("uploads/u/a")
    assert [path for path in root.rglob("*") if path.is_file()] == []
    assert not (root / "uploads").exists()


def test_unusable_directory_fails_with_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(BlobStoreUnavailable, match="cannot be written"):
        open_blob_store(f"file://{tmp_path / 'file' / 'below'}").check()


def test_missing_bucket_fails_with_one_sentence(s3_environment: None) -> None:
    blobs = open_blob_store("s3://no-such-bucket")
    with pytest.raises(BlobStoreUnavailable, match=r"no-such-bucket does not exist \(endpoint http://"):
        blobs.check()
    with pytest.raises(BlobStoreUnavailable, match="no-such-bucket"):
        blobs.put("k/one", b"1")
    with pytest.raises(BlobStoreUnavailable, match="no-such-bucket"):
        list(blobs.list_keys())


def test_server_that_is_down_raises_unavailable(s3_environment: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    with pytest.raises(BlobStoreUnavailable, match="bucket"):
        open_blob_store("s3://bucket").read_bytes("k/one")


@pytest.mark.parametrize(
    "url", ["", "file://", "/srv/blobs", "gs://bucket", "s3://", "s3:///prefix", "s3://B_/x", "s3://bucket/a b"]
)
def test_invalid_url_is_refused_with_a_remedy(url: str) -> None:
    with pytest.raises(InvalidBlobUrl, match=r"use (file|s3)://"):
        open_blob_store(url)


def test_unfinished_files_are_removed_after_a_day(tmp_path: Path) -> None:
    blobs = LocalBlobStore(tmp_path / "blobs")
    blobs.remove_unfinished()
    old, young = blobs._write_unfinished(b"old"), blobs._write_unfinished(b"young")
    yesterday = time.time() - 86_401
    os.utime(old, (yesterday, yesterday))
    blobs.remove_unfinished()
    assert (old.exists(), young.exists()) == (False, True)


_PUT_UNTIL_KILLED = """
import sys
from pathlib import Path
from loramux.adapter_store.blobs.local import LocalBlobStore

blobs = LocalBlobStore(Path(sys.argv[1]))
number = 0
while True:
    blobs.put(f"k/{number}", bytes([number % 256]) * 200_000)
    print(number, flush=True)
    number += 1
"""


def test_only_acknowledged_blobs_survive_a_kill(tmp_path: Path) -> None:
    root = tmp_path / "blobs"
    writer = subprocess.Popen([sys.executable, "-c", _PUT_UNTIL_KILLED, str(root)], stdout=subprocess.PIPE)
    assert writer.stdout is not None
    acknowledged = [int(writer.stdout.readline()) for _ in range(20)]
    writer.send_signal(signal.SIGKILL)
    rest, _ = writer.communicate()
    acknowledged += [int(line) for line in rest.splitlines()]
    blobs = LocalBlobStore(root)
    keys = list(blobs.list_keys())
    assert {f"k/{number}" for number in acknowledged} <= set(keys)
    assert len(keys) <= len(acknowledged) + 1, "only the unacknowledged put may also be visible"
    for key in keys:
        assert blobs.read_bytes(key) == bytes([int(key.removeprefix("k/")) % 256]) * 200_000
