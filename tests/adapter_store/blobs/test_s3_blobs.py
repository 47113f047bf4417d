from __future__ import annotations

import gzip
import hashlib
import random
import threading
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import boto3
import httpx
import pytest

from loramux.adapter_store.blobs.blob_url import open_blob_store
from loramux.adapter_store.blobs.interface import BlobStore, PresignedPut
from loramux.adapter_store.blobs.local import LocalBlobStore
from loramux.adapter_store.blobs.s3_blobs import S3BlobStore
from loramux.adapter_store.blobs.s3_limits import MIN_PART_BYTES, S3Limits
from loramux.adapter_store.errors import BlobDamaged, BlobNotFound, BlobStoreUnavailable, PartsMissing
from tests.adapter_store.blobs.fault_proxy import Fault, FaultProxy, ListedPlan
from tests.adapter_store.blobs.limits import SMALL_PARTS
from tests.adapter_store.blobs.radosgw import IS_RADOSGW
from tests.adapter_store.memory_blobs import MemoryBlobStore

PREFIX = "some/prefix"
THREE_PARTS = random.Random(3).randbytes(2 * MIN_PART_BYTES + 12345)
DAY_S = 86_400

only_moto = pytest.mark.skipif(IS_RADOSGW, reason="needs a store without signature checks, or with more conditions")


only_radosgw = pytest.mark.skipif(not IS_RADOSGW, reason="moto checks no signatures")


@pytest.fixture
def s3_blobs(s3_bucket: str) -> S3BlobStore:
    # moto and radosgw obey unsigned headers. These tests show what else a signature covers.
    return S3BlobStore(s3_bucket, PREFIX, SMALL_PARTS, is_presigning=True)


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def send(put: PresignedPut, data: bytes, **headers: str) -> int:
    with httpx.Client(trust_env=False) as client:
        return client.request(put.method, put.url, content=data, headers={**put.headers, **headers}).status_code


@only_moto
def test_large_file_is_uploaded_in_parts(
    fault_proxy: FaultProxy, s3_bucket: str, raw_bucket: Any, tmp_path: Path
) -> None:
    blobs = S3BlobStore(s3_bucket, PREFIX, SMALL_PARTS)
    (tmp_path / "source").write_bytes(THREE_PARTS)
    assert blobs.put("k/large", tmp_path / "source")
    assert not blobs.put("k/large", tmp_path / "source")
    assert raw_bucket.Object(f"{PREFIX}/k/large").e_tag.endswith('-3"')
    assert blobs.read_bytes("k/large") == THREE_PARTS


@only_moto
@pytest.mark.campaign
def test_exactly_one_of_many_multipart_writers_wins(
    fault_proxy: FaultProxy, s3_bucket: str, raw_bucket: Any, tmp_path: Path
) -> None:
    blobs = S3BlobStore(s3_bucket, PREFIX, SMALL_PARTS)
    won = []

    def write(number: int) -> None:
        source = tmp_path / str(number)
        source.write_bytes(b"%d" % number * 2 * MIN_PART_BYTES)
        if blobs.put("k/contended", source):
            won.append(number)

    threads = [threading.Thread(target=write, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(won) == 1
    assert blobs.read_bytes("k/contended") == b"%d" % won[0] * 2 * MIN_PART_BYTES
    assert list(raw_bucket.multipart_uploads.all()) == []


@only_moto
def test_large_file_is_put_in_one_piece_without_conditional_multipart(
    s3_endpoint: str, s3_bucket: str, raw_bucket: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "source").write_bytes(THREE_PARTS)
    proxy = FaultProxy(s3_endpoint, ListedPlan("POST", None, Fault.NOT_IMPLEMENTED))
    monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.url)
    blobs = S3BlobStore(s3_bucket, PREFIX, SMALL_PARTS)
    assert blobs.put("k/large", tmp_path / "source")
    proxy.stop()
    assert "-" not in raw_bucket.Object(f"{PREFIX}/k/large").e_tag
    assert [item.key for item in raw_bucket.objects.all()] == [f"{PREFIX}/k/large"], "the probe is deleted"


@only_moto
def test_failed_multipart_upload_is_aborted(
    fault_proxy: FaultProxy, s3_bucket: str, raw_bucket: Any, tmp_path: Path
) -> None:
    (tmp_path / "source").write_bytes(THREE_PARTS)
    blobs = S3BlobStore(s3_bucket, PREFIX, SMALL_PARTS)
    fault_proxy.plan = ListedPlan("PUT", Fault.EXPIRED, part_of_path="partNumber=2")
    with pytest.raises(BlobStoreUnavailable, match="ExpiredToken"):
        blobs.put("k/large", tmp_path / "source")
    assert list(raw_bucket.multipart_uploads.all()) == []
    assert not blobs.exists("k/large")


def test_multipart_uploads_are_aborted_after_a_day(s3_bucket: str, raw_bucket: Any) -> None:
    ours, other = raw_bucket.Object(f"{PREFIX}/k/large"), raw_bucket.Object("another/prefix")
    uploads = [ours.initiate_multipart_upload(), other.initiate_multipart_upload()]
    began_s = next(iter(raw_bucket.multipart_uploads.all())).initiated.timestamp()
    S3BlobStore(s3_bucket, PREFIX, now_s=lambda: began_s + DAY_S - 60).remove_unfinished()
    assert {upload.id for upload in raw_bucket.multipart_uploads.all()} == {upload.id for upload in uploads}
    S3BlobStore(s3_bucket, PREFIX, now_s=lambda: began_s + DAY_S + 60).remove_unfinished()
    assert [upload.id for upload in raw_bucket.multipart_uploads.all()] == [uploads[1].id]


def test_leftover_probes_are_removed_after_a_day(s3_bucket: str, raw_bucket: Any) -> None:
    raw_bucket.put_object(Key=f"{PREFIX}/probes/left", Body=b"1")
    tomorrow_s = datetime.now(UTC).timestamp() + DAY_S + 60
    S3BlobStore(s3_bucket, PREFIX).remove_unfinished()
    assert len(list(raw_bucket.objects.all())) == 1
    S3BlobStore(s3_bucket, PREFIX, now_s=lambda: tomorrow_s).remove_unfinished()
    assert list(raw_bucket.objects.all()) == []


def test_presigned_put_works_with_any_client(s3_blobs: S3BlobStore) -> None:
    put = s3_blobs.presign_put("uploads/u/file", 5, sha256(b"hello"), 60)
    assert put is not None
    assert send(put, b"hello") == 200
    assert s3_blobs.read_bytes("uploads/u/file") == b"hello"
    info = s3_blobs.head("uploads/u/file")
    assert info is not None
    assert info.size == 5
    assert send(put, b"hello") == 412, "an existing blob is kept"


@only_radosgw
@pytest.mark.parametrize(
    ("data", "headers"),
    [
        (b"hell", {"content-length": "4"}),
        (b"hello, world", {"content-length": "12"}),
        (b"hello", {"if-none-match": ""}),
        (b"hello", {"x-amz-checksum-sha256": "AAAA"}),
    ],
    ids=["shorter", "longer", "unconditional", "another-checksum"],
)
def test_presigned_put_accepts_only_the_signed_bytes(
    s3_blobs: S3BlobStore, data: bytes, headers: dict[str, str]
) -> None:
    put = s3_blobs.presign_put("uploads/u/file", 5, sha256(b"hello"), 60)
    assert put is not None
    assert send(put, data, **headers) in (400, 403)
    assert not s3_blobs.exists("uploads/u/file")


def outcome(url: str, method: str, data: bytes = b"", **headers: str) -> int:
    with httpx.Client(trust_env=False) as client:
        return client.request(method, url, content=data, headers=headers).status_code


@only_radosgw
def test_presigned_put_is_good_for_nothing_else(s3_blobs: S3BlobStore, raw_bucket: Any) -> None:
    s3_blobs.put("packed/secret", b"of another tenant")
    put = s3_blobs.presign_put("uploads/u/file", 5, sha256(b"hello"), 60)
    assert put is not None
    before, after = put.url.split("?")
    object_url, bucket_url = before, before.removesuffix(f"/{PREFIX}/uploads/u/file")
    others = {
        "reads it": ("GET", put.url),
        "deletes it": ("DELETE", put.url),
        "lists the bucket": ("GET", f"{bucket_url}?list-type=2&{after}"),
        "lists its parts": ("GET", f"{object_url}?uploads&{after}"),
        "begins a multipart upload": ("POST", f"{object_url}?uploads&{after}"),
        "sets its rights": ("PUT", f"{object_url}?acl&{after}"),
        "another key": ("PUT", f"{object_url}2?{after}"),
        "a key above it": ("PUT", f"{before.removesuffix('/u/file')}/../../packed/secret?{after}"),
        "an encoded key above it": ("PUT", f"{before.removesuffix('file')}%2e%2e%2f%2e%2e%2fpacked%2fsecret?{after}"),
        "a longer life": ("PUT", put.url.replace("X-Amz-Expires=60", "X-Amz-Expires=600000")),
        "no signature": ("PUT", before),
    }
    for what, (method, url) in others.items():
        assert outcome(url, method, b"hello", **put.headers) in (400, 403, 404, 405), what
    assert [one.key for one in raw_bucket.objects.all()] == [f"{PREFIX}/packed/secret"]
    assert s3_blobs.read_bytes("packed/secret") == b"of another tenant"


def test_nothing_is_presigned_on_a_store_that_obeys_unsigned_headers(s3_bucket: str, raw_bucket: Any) -> None:
    """On moto and radosgw, the holder of a presigned PUT could copy any blob of the bucket into an upload."""
    trusting = S3BlobStore(s3_bucket, PREFIX, SMALL_PARTS, is_presigning=True)
    trusting.put("packed/secret", b"other")
    put = trusting.presign_put("uploads/u/file", 5, sha256(b"other"), 60)
    assert put is not None
    assert send(put, b"hello", **{"x-amz-copy-source": f"/{s3_bucket}/{PREFIX}/packed/secret"}) == 200
    assert trusting.read_bytes("uploads/u/file") == b"other"

    blobs = S3BlobStore(s3_bucket, PREFIX, SMALL_PARTS)
    assert blobs.presign_put("uploads/u/other", 5, sha256(b"other"), 60) is None
    assert blobs.presign_parts("uploads/u/other", MIN_PART_BYTES + 1, 60) is None
    assert list(raw_bucket.multipart_uploads.all()) == []
    assert not list(blobs.list_keys("probes/"))


@pytest.mark.parametrize("fault", [Fault.EXPIRED, None], ids=["refused", "ignored"])
def test_uploads_are_presigned_if_the_store_copies_nothing(
    fault_proxy: FaultProxy, s3_bucket: str, fault: Fault | None
) -> None:
    def plan(method: str, path: str) -> Fault | None:
        return fault if method == "PUT" and "X-Amz-Signature" in path else None

    fault_proxy.plan = plan
    fault_proxy.dropped.add("x-amz-copy-source")
    blobs = S3BlobStore(s3_bucket, PREFIX, SMALL_PARTS)
    assert blobs.presign_put("uploads/u/file", 5, sha256(b"other"), 60) is not None
    assert not list(blobs.list_keys("probes/"))


@only_radosgw
def test_expired_presigned_put_is_refused(s3_blobs: S3BlobStore) -> None:
    put = s3_blobs.presign_put("uploads/u/file", 5, sha256(b"hello"), 1)
    assert put is not None
    time.sleep(2.5)
    assert send(put, b"hello") == 403
    assert not s3_blobs.exists("uploads/u/file")


@pytest.mark.parametrize(
    "headers",
    [
        {"content-encoding": "gzip"},
        {"content-encoding": "aws-chunked"},
        {"content-type": "text/html"},
        {"x-amz-meta-sha256": "0" * 64},
        {"cache-control": "max-age=31536000"},
    ],
    ids=lambda headers: "-".join(headers.values())[:20],
)
def test_headers_that_a_signature_leaves_open_change_no_bytes(
    s3_blobs: S3BlobStore, headers: dict[str, str], tmp_path: Path
) -> None:
    """Whatever the object's metadata say, the blob is the bytes that were sent, or is refused."""
    data = gzip.compress(b"hello" * 100, mtime=0)
    put = s3_blobs.presign_put("uploads/u/file", len(data), sha256(data), 60)
    assert put is not None
    if send(put, data, **headers) != 200:
        assert not s3_blobs.exists("uploads/u/file")
        return
    try:
        assert s3_blobs.read_bytes("uploads/u/file") == data
        s3_blobs.get("uploads/u/file", tmp_path / "copy", max_bytes=len(data))
        assert (tmp_path / "copy").read_bytes() == data
    except (BlobDamaged, BlobStoreUnavailable):
        pass


@pytest.mark.parametrize("replaced_part", [0, 1])
def test_part_that_is_sent_again_after_completion_changes_nothing(
    s3_blobs: S3BlobStore, tmp_path: Path, replaced_part: int
) -> None:
    data = random.Random(5).randbytes(MIN_PART_BYTES + 1)
    upload = s3_blobs.presign_parts("uploads/u/file", len(data), 60)
    assert upload is not None
    chunks = [data[: upload.part_bytes], data[upload.part_bytes :]]
    for part, chunk in zip(upload.parts, chunks, strict=True):
        assert send(part, chunk) == 200
    assert s3_blobs.complete_parts("uploads/u/file", upload.upload_id, len(data))
    assert send(upload.parts[replaced_part], bytes(len(chunks[replaced_part]))) >= 400
    s3_blobs.get("uploads/u/file", tmp_path / "copy")
    assert (tmp_path / "copy").read_bytes() == data


@pytest.mark.parametrize(
    "extra", [pytest.param(0, marks=pytest.mark.campaign, id="whole-parts"), pytest.param(1, id="a-byte-more")]
)
def test_presigned_parts_are_combined_into_a_blob(s3_blobs: S3BlobStore, tmp_path: Path, extra: int) -> None:
    data = random.Random(4).randbytes(2 * MIN_PART_BYTES + extra)
    assert s3_blobs.presign_put("uploads/u/file", len(data), sha256(data), 60) is None
    upload = s3_blobs.presign_parts("uploads/u/file", len(data), 60)
    assert upload is not None
    assert len(upload.parts) == 2 + extra
    for number, part in enumerate(upload.parts):
        assert not s3_blobs.exists("uploads/u/file")
        with pytest.raises((PartsMissing, BlobNotFound)):
            s3_blobs.complete_parts("uploads/u/file", upload.upload_id, len(data))
        start = number * upload.part_bytes
        assert send(part, data[start : start + upload.part_bytes]) == 200
    assert s3_blobs.complete_parts("uploads/u/file", upload.upload_id, len(data))
    s3_blobs.get("uploads/u/file", tmp_path / "copy")
    assert (tmp_path / "copy").read_bytes() == data
    assert not s3_blobs.complete_parts("uploads/u/file", upload.upload_id, len(data)), "the key is taken"


def test_presigned_parts_do_not_replace_a_blob(s3_blobs: S3BlobStore, raw_bucket: Any) -> None:
    data = bytes(MIN_PART_BYTES + 1)
    upload = s3_blobs.presign_parts("uploads/u/file", len(data), 60)
    assert upload is not None
    for number, part in enumerate(upload.parts):
        start = number * upload.part_bytes
        assert send(part, data[start : start + upload.part_bytes]) == 200
    s3_blobs.put("uploads/u/file", b"first")
    assert not s3_blobs.complete_parts("uploads/u/file", upload.upload_id, len(data))
    assert s3_blobs.read_bytes("uploads/u/file") == b"first"
    assert list(raw_bucket.multipart_uploads.all()) == []


def test_aborted_parts_are_gone(s3_blobs: S3BlobStore, raw_bucket: Any) -> None:
    upload = s3_blobs.presign_parts("uploads/u/file", MIN_PART_BYTES + 1, 60)
    assert upload is not None
    assert send(upload.parts[1], b"1") == 200
    s3_blobs.abort_parts("uploads/u/file", upload.upload_id)
    s3_blobs.abort_parts("uploads/u/file", upload.upload_id)
    assert list(raw_bucket.multipart_uploads.all()) == []
    with pytest.raises(BlobNotFound):
        s3_blobs.complete_parts("uploads/u/file", upload.upload_id, MIN_PART_BYTES + 1)


def test_presigned_lifetime_is_limited_to_seven_days(s3_blobs: S3BlobStore) -> None:
    put = s3_blobs.presign_put("uploads/u/file", 5, sha256(b"hello"), 30 * DAY_S)
    assert put is not None
    assert send(put, b"hello") == 200
    assert "X-Amz-Expires=604800" in put.url


def test_nothing_is_presigned_without_credentials(
    s3_bucket: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    # boto3 caches credentials.
    monkeypatch.setattr(boto3, "DEFAULT_SESSION", None)
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    blobs = S3BlobStore(s3_bucket, PREFIX, is_presigning=True)
    with pytest.raises(BlobStoreUnavailable, match="cannot sign"):
        blobs.presign_put("uploads/u/file", 5, sha256(b"hello"), 60)
    with pytest.raises(BlobStoreUnavailable, match="no credentials found"):
        blobs.read_bytes("uploads/u/file")


@pytest.mark.parametrize("kind", ["memory", "local"])
def test_other_stores_do_not_presign(tmp_path: Path, kind: str) -> None:
    blobs: BlobStore = MemoryBlobStore() if kind == "memory" else LocalBlobStore(tmp_path)
    assert blobs.presign_put("k/one", 1, sha256(b"1"), 60) is None
    assert blobs.presign_parts("k/one", 1 << 30, 60) is None


def test_foreign_objects_are_read_by_url(s3_bucket: str, raw_bucket: Any, tmp_path: Path) -> None:
    raw_bucket.put_object(Key="team/adapter/adapter_model.safetensors", Body=b"not ours")
    blobs = open_blob_store(f"s3://{s3_bucket}/team/adapter")
    info = blobs.head("adapter_model.safetensors")
    assert info is not None
    assert (info.size, info.sha256) == (8, None)
    blobs.get("adapter_model.safetensors", tmp_path / "copy", max_bytes=8)
    assert (tmp_path / "copy").read_bytes() == b"not ours"


def test_blob_damaged_in_the_store_is_reported(s3_bucket: str, raw_bucket: Any, tmp_path: Path) -> None:
    raw_bucket.put_object(Key="k/one", Body=b"changed", Metadata={"loramux-sha256": sha256(b"written")})
    blobs = S3BlobStore(s3_bucket, limits=S3Limits(first_pause_s=0.01))
    with pytest.raises(BlobDamaged):
        blobs.get("k/one", tmp_path / "copy")
    with pytest.raises(BlobDamaged):
        blobs.read_bytes("k/one")


def test_a_good_store_passes_the_probe(s3_blobs: S3BlobStore, raw_bucket: Any) -> None:
    s3_blobs.check()
    assert list(raw_bucket.objects.all()) == []


def test_a_store_that_ignores_conditions_is_refused(
    moto_endpoint: str, s3_environment: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    proxy = FaultProxy(moto_endpoint, dropped=["if-none-match"])
    monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.url)
    bucket = boto3.resource("s3").create_bucket(Bucket="ignores-conditions")
    with pytest.raises(BlobStoreUnavailable, match=r"ignores If-None-Match.*use a store with conditional writes"):
        open_blob_store("s3://ignores-conditions/prefix").check()
    assert list(bucket.objects.all()) == []
    proxy.stop()


def test_store_without_conditional_requests_is_refused(fault_proxy: FaultProxy, s3_bucket: str) -> None:
    fault_proxy.plan = ListedPlan("PUT", Fault.NOT_IMPLEMENTED)
    with pytest.raises(BlobStoreUnavailable, match="does not support If-None-Match"):
        open_blob_store(f"s3://{s3_bucket}").check()


@pytest.mark.parametrize("nth", [0, 1], ids=["first-put", "second-put"])
def test_lost_answer_does_not_mislead_the_probe(fault_proxy: FaultProxy, s3_bucket: str, nth: int) -> None:
    fault_proxy.plan = ListedPlan("PUT", *[None] * nth, Fault.LOST_RESET)
    open_blob_store(f"s3://{s3_bucket}").check()
