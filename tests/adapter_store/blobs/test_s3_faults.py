from __future__ import annotations

import io
import random
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from boto3.s3.transfer import TransferConfig

from loramux.adapter_store.blobs.circuit_breaker import CircuitBreaker
from loramux.adapter_store.blobs.retry_budget import RetryBudget
from loramux.adapter_store.blobs.s3_blobs import S3BlobStore
from loramux.adapter_store.blobs.s3_limits import MIN_PART_BYTES
from loramux.adapter_store.errors import BlobDamaged, BlobNotFound, BlobStoreUnavailable
from tests.adapter_store.blobs.fault_proxy import Fault, FaultProxy, ListedPlan, no_faults
from tests.adapter_store.blobs.limits import HURRIED, PATIENT
from tests.adapter_store.blobs.radosgw import IS_RADOSGW

DATA = random.Random(1).randbytes(70_000)
LARGE = random.Random(2).randbytes(3 * MIN_PART_BYTES + 1)
MARGIN_S = 10.0
"""Extra time allowed for a busy machine, in seconds."""

PASSING = (
    Fault.SLOW_DOWN,
    Fault.RESET,
    Fault.LOST_RESET,
    Fault.HANG,
    Fault.LOST_HANG,
    Fault.TRUNCATE,
    Fault.FLIP,
)
"""Faults that a retry can overcome."""

only_moto = pytest.mark.skipif(IS_RADOSGW, reason="radosgw 16 ignores conditions on multipart uploads")
by_value = {"ids": lambda fault: fault.name.lower().replace("_", "-")}


def never_opens() -> CircuitBreaker:
    return CircuitBreaker(max_failures=1_000_000)


@pytest.fixture
def s3_blobs(fault_proxy: FaultProxy, s3_bucket: str) -> S3BlobStore:
    return S3BlobStore(s3_bucket, "p", HURRIED)


@pytest.fixture
def patient_blobs(fault_proxy: FaultProxy, s3_bucket: str) -> S3BlobStore:
    return S3BlobStore(s3_bucket, "p", PATIENT, never_opens())


def always(fault: Fault, method: str) -> Callable[[str, str], Fault | None]:
    return lambda asked, path: fault if asked == method else None


@pytest.mark.parametrize("fault", PASSING, **by_value)
def test_read_is_retried_after_one_failure(
    fault_proxy: FaultProxy, s3_blobs: S3BlobStore, tmp_path: Path, fault: Fault
) -> None:
    s3_blobs.put("k/one", DATA)
    fault_proxy.plan = ListedPlan("GET", fault)
    s3_blobs.get("k/one", tmp_path / "copy")
    assert (tmp_path / "copy").read_bytes() == DATA
    assert fault_proxy.num_injected == {fault: 1}


@pytest.mark.campaign
@pytest.mark.parametrize("fault", sorted(set(Fault) - {Fault.STALE, Fault.FLIP_HEAD}, key=str), **by_value)
def test_persistently_failing_read_ends_before_its_deadline(
    fault_proxy: FaultProxy, s3_blobs: S3BlobStore, tmp_path: Path, fault: Fault
) -> None:
    s3_blobs.put("k/one", DATA)
    fault_proxy.plan = always(fault, "GET")
    begin = time.monotonic()
    with pytest.raises(BlobDamaged if fault is Fault.FLIP else BlobStoreUnavailable) as caught:
        s3_blobs.get("k/one", tmp_path / "copy")
    assert time.monotonic() - begin < HURRIED.body_s + MARGIN_S
    assert "127.0.0.1" not in str(caught.value)
    assert "k/one" not in str(caught.value)


def test_slow_response_ends_at_the_callers_deadline(fault_proxy: FaultProxy, s3_bucket: str, tmp_path: Path) -> None:
    # The store's own limits are longer.
    s3_blobs = S3BlobStore(s3_bucket, "p", replace(HURRIED, call_s=60.0, body_s=60.0))
    s3_blobs.put("k/one", DATA)
    fault_proxy.plan = always(Fault.DRIP, "GET")
    begin = time.monotonic()
    with pytest.raises(BlobStoreUnavailable, match="deadline exceeded"):
        s3_blobs.get("k/one", tmp_path / "copy", deadline_s=0.4)
    assert time.monotonic() - begin < 0.4 + MARGIN_S
    fault_proxy.plan = no_faults
    s3_blobs.get("k/one", tmp_path / "copy")


@pytest.mark.parametrize("num_answers", [40, pytest.param(600, marks=pytest.mark.campaign)])
def test_damaged_response_head_never_returns_wrong_bytes(
    fault_proxy: FaultProxy, s3_bucket: str, tmp_path: Path, num_answers: int
) -> None:
    blobs = S3BlobStore(s3_bucket, "p", HURRIED, never_opens())
    blobs.put("k/one", DATA[:300])
    fault_proxy.plan = always(Fault.FLIP_HEAD, "GET")
    num_right = num_refused = 0
    while fault_proxy.num_injected[Fault.FLIP_HEAD] < num_answers:
        try:
            blobs.get("k/one", tmp_path / "copy")
        except (BlobStoreUnavailable, BlobNotFound):
            num_refused += 1
        else:
            num_right += 1
            assert (tmp_path / "copy").read_bytes() == DATA[:300]
    assert num_right > num_refused, "most bits of a head are harmless, or a retry succeeds"


@pytest.mark.parametrize("fault", [fault for fault in PASSING if fault is not Fault.FLIP], **by_value)
def test_retried_write_is_recognized_as_ours(fault_proxy: FaultProxy, s3_blobs: S3BlobStore, fault: Fault) -> None:
    fault_proxy.plan = ListedPlan("PUT", fault)
    assert s3_blobs.put("k/one", DATA), "there was no other writer"
    assert not s3_blobs.put("k/one", DATA), "equal bytes do not make it our write"
    assert s3_blobs.read_bytes("k/one") == DATA


def test_retried_write_recognizes_another_writers_blob(
    raw_bucket: Any, fault_proxy: FaultProxy, s3_blobs: S3BlobStore
) -> None:
    def interfere(method: str, path: str) -> Fault | None:
        if method != "PUT" or fault_proxy.num_injected:
            return None
        raw_bucket.put_object(Key="p/k/one", Body=DATA)
        return Fault.RESET

    fault_proxy.plan = interfere
    assert not s3_blobs.put("k/one", DATA)


def test_bytes_damaged_during_upload_are_never_read(fault_proxy: FaultProxy, s3_blobs: S3BlobStore) -> None:
    fault_proxy.plan = ListedPlan("PUT", Fault.FLIP)
    assert s3_blobs.put("k/one", DATA)
    fault_proxy.plan = no_faults
    if IS_RADOSGW:
        assert s3_blobs.read_bytes("k/one") == DATA, "the store noticed, and got the bytes again"
    else:
        with pytest.raises(BlobDamaged):
            s3_blobs.read_bytes("k/one")


@only_moto
@pytest.mark.campaign
@pytest.mark.parametrize("method", ["PUT", "POST"], ids=["a-part", "completion"])
@pytest.mark.parametrize("fault", [Fault.SLOW_DOWN, Fault.LOST_RESET, Fault.LOST_HANG, Fault.TRUNCATE], **by_value)
def test_failed_parts_are_sent_again(
    raw_bucket: Any, fault_proxy: FaultProxy, patient_blobs: S3BlobStore, tmp_path: Path, fault: Fault, method: str
) -> None:
    (tmp_path / "source").write_bytes(LARGE)
    fault_proxy.plan = ListedPlan(method, fault, part_of_path="k/large?uploadId=")
    assert patient_blobs.put("k/large", tmp_path / "source")
    assert patient_blobs.read_bytes("k/large") == LARGE
    assert list(raw_bucket.multipart_uploads.all()) == []


@pytest.mark.campaign
@pytest.mark.parametrize("fault", PASSING, **by_value)
def test_failed_range_is_requested_again(
    raw_bucket: Any, fault_proxy: FaultProxy, patient_blobs: S3BlobStore, tmp_path: Path, fault: Fault
) -> None:
    raw_bucket.put_object(Key="p/k/large", Body=LARGE)
    fault_proxy.plan = ListedPlan("GET", None, None, fault)
    patient_blobs.get("k/large", tmp_path / "copy")
    assert (tmp_path / "copy").read_bytes() == LARGE


def put_in_parts(raw_bucket: Any, data: bytes) -> None:
    """As if uploaded in parts by another tool, the object has no comparable checksum."""
    config = TransferConfig(multipart_threshold=MIN_PART_BYTES, multipart_chunksize=MIN_PART_BYTES)
    raw_bucket.upload_fileobj(io.BytesIO(data), "p/k/large", Config=config)


@pytest.mark.campaign
@pytest.mark.parametrize("heeds", [True, pytest.param(False, marks=only_moto)], ids=["if-match", "without-if-match"])
@pytest.mark.parametrize("nth", [1, 2, 3], ids=["second-range", "third-range", "last-range"])
def test_ranges_of_a_replaced_object_are_never_mixed(
    raw_bucket: Any, fault_proxy: FaultProxy, patient_blobs: S3BlobStore, tmp_path: Path, nth: int, heeds: bool
) -> None:
    if not heeds:
        fault_proxy.dropped.add("if-match")
    put_in_parts(raw_bucket, LARGE)
    other = LARGE[::-1]
    gets = []
    lock = threading.Lock()

    def replace(method: str, path: str) -> Fault | None:
        with lock:
            if method == "GET":
                gets.append(path)
                if len(gets) == nth + 1:
                    put_in_parts(raw_bucket, other)
        return None

    fault_proxy.plan = replace
    patient_blobs.get("k/large", tmp_path / "copy")
    assert (tmp_path / "copy").read_bytes() in (other, LARGE)


@pytest.mark.campaign
def test_range_of_another_object_is_refused(
    raw_bucket: Any, fault_proxy: FaultProxy, patient_blobs: S3BlobStore, tmp_path: Path
) -> None:
    raw_bucket.put_object(Key="p/k/other", Body=LARGE[::-1])
    raw_bucket.put_object(Key="p/k/large", Body=LARGE)
    patient_blobs.get("k/other", tmp_path / "other")
    for number in range(1, 4):
        fault_proxy.plan = ListedPlan("GET", *[None] * number, Fault.STALE)
        try:
            patient_blobs.get("k/large", tmp_path / "copy")
        except BlobNotFound:
            continue
        assert (tmp_path / "copy").read_bytes() == LARGE


@pytest.mark.parametrize("fault", [Fault.EXPIRED, Fault.NOT_IMPLEMENTED], **by_value)
def test_permanent_errors_are_not_retried(fault_proxy: FaultProxy, s3_bucket: str, fault: Fault) -> None:
    # An answer that comes late would be asked for again.
    patient_blobs = S3BlobStore(s3_bucket, "p", replace(PATIENT, read_s=60.0), never_opens())
    patient_blobs.put("k/one", DATA)
    for _ in range(20):
        fault_proxy.num_requests.clear()
        fault_proxy.plan = ListedPlan("GET", fault)
        with pytest.raises(BlobStoreUnavailable) as caught:
            patient_blobs.read_bytes("k/one")
        assert fault_proxy.num_requests == {"GET": 1}
        assert caught.value.retry_after_s is None, "the store answers, so a retry may follow immediately"
    assert patient_blobs.read_bytes("k/one") == DATA


def test_persistently_failing_store_opens_the_breaker(fault_proxy: FaultProxy, s3_bucket: str) -> None:
    clock = [100.0]
    breaker = CircuitBreaker(max_failures=5, first_open_s=1.0, clock=lambda: clock[0])
    # An answer that comes late would be another failure.
    blobs = S3BlobStore(s3_bucket, "p", replace(PATIENT, read_s=60.0), breaker)
    blobs.put("k/one", DATA)
    fault_proxy.plan = always(Fault.SLOW_DOWN, "GET")
    for _ in range(2):
        with pytest.raises(BlobStoreUnavailable):
            blobs.read_bytes("k/one")
    fault_proxy.num_requests.clear()
    with pytest.raises(BlobStoreUnavailable, match="repeated failures") as caught:
        blobs.read_bytes("k/one")
    assert caught.value.retry_after_s == 1.0
    assert fault_proxy.num_requests == {}
    assert blobs.breaker_state == "open"
    fault_proxy.plan = no_faults
    clock[0] += 1.0
    assert blobs.read_bytes("k/one") == DATA
    assert blobs.breaker_state == "closed"


def test_an_outage_does_not_multiply_the_traffic(fault_proxy: FaultProxy, s3_bucket: str) -> None:
    budget = RetryBudget(capacity=10, refill_per_s=0)
    blobs = S3BlobStore(s3_bucket, "p", HURRIED, never_opens(), budget)
    fault_proxy.plan = always(Fault.SLOW_DOWN, "GET")
    for _ in range(50):
        with pytest.raises(BlobStoreUnavailable):
            blobs.read_bytes("k/one")
    assert fault_proxy.num_requests["GET"] == 60
