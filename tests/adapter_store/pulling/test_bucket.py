"""Base models are pulled from a bucket as from a hub. The state of the prefix takes the place of a commit."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from loramux.adapter_store.blobs import s3_blobs
from loramux.adapter_store.blobs.s3_limits import MIN_PART_BYTES
from loramux.adapter_store.errors import PullRefused, SourceUnavailable
from loramux.adapter_store.pulling.model_name import ModelName
from loramux.adapter_store.pulling.pull_settings import PullSettings
from tests.adapter_store.blobs.fault_proxy import Fault, FaultProxy, no_faults
from tests.adapter_store.blobs.limits import PATIENT
from tests.adapter_store.pulling.pulled import FILES, NEEDED, SHARDS, Pulls, contents

LARGE = random.Random(5).randbytes(2 * MIN_PART_BYTES + 12345)


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(s3_blobs, "S3Limits", lambda: PATIENT)


@pytest.fixture
def pulls(tmp_path: Path) -> Pulls:
    return Pulls(PullSettings(tmp_path / "models"))


def put(bucket: Any, prefix: str, files: dict[str, bytes]) -> str:
    for name, content in files.items():
        bucket.put_object(Key=f"{prefix}/{name}", Body=content)
    return f"s3://{bucket.name}/{prefix}"


def test_model_of_a_bucket(raw_bucket: Any, pulls: Pulls) -> None:
    name = put(raw_bucket, "bases/tiny", FILES)
    put(raw_bucket, "bases/tiny-2", {"config.json": b"{}"})
    model = pulls(name)
    assert contents(model.path) == NEEDED
    assert pulls.find(f"{name}/") == model
    assert model.path.is_relative_to(pulls.settings.models_dir / "s3" / raw_bucket.name)
    assert pulls(name) == model
    put(raw_bucket, "bases/tiny", {SHARDS[0]: b"other weights"})
    assert pulls.find(name) == model, "what was pulled stays until it is pulled again"
    other = pulls(name)
    assert contents(other.path) == {**NEEDED, SHARDS[0]: b"other weights"}
    assert other.record.commit != model.record.commit


def test_gguf_file_and_a_whole_bucket(raw_bucket: Any, pulls: Pulls) -> None:
    name = put(raw_bucket, "gguf", {"a.gguf": b"GGUF a", "b.gguf": b"GGUF b"})
    model = pulls(f"{name}/a.gguf")
    assert (model.path.name, contents(model.directory)) == ("a.gguf", {"a.gguf": b"GGUF a"})
    for file, content in NEEDED.items():
        raw_bucket.put_object(Key=file, Body=content)
    assert contents(pulls(f"s3://{raw_bucket.name}").path) == NEEDED


def test_large_object_is_read_in_parts_and_continued(
    fault_proxy: FaultProxy, raw_bucket: Any, pulls: Pulls, tmp_path: Path
) -> None:
    name = put(raw_bucket, "gguf", {"large.gguf": LARGE})
    puller = pulls.puller
    plan = puller.plan(ModelName.parse(f"{name}/large.gguf"))
    unfinished = puller.cache.unfinished(plan.name, plan.commit)
    unfinished.mkdir(parents=True)
    (unfinished / "large.gguf.part").write_bytes(LARGE[: MIN_PART_BYTES + 7])
    counted: list[int] = []
    model = puller.carry_out(plan, progress=lambda _, num_bytes: counted.append(num_bytes))
    assert model.path.read_bytes() == LARGE
    assert sum(counted) == len(LARGE) - MIN_PART_BYTES - 7


def test_store_that_fails_ends_the_pull_and_keeps_what_arrived(
    fault_proxy: FaultProxy, raw_bucket: Any, pulls: Pulls
) -> None:
    name = put(raw_bucket, "gguf", {"large.gguf": LARGE})
    puller = pulls.puller
    plan = puller.plan(ModelName.parse(f"{name}/large.gguf"))
    fault_proxy.plan = lambda method, _: Fault.SLOW_DOWN if method == "GET" else None
    with pytest.raises(SourceUnavailable, match="cannot read a blob"):
        puller.carry_out(plan)
    fault_proxy.plan = no_faults
    assert pulls(f"{name}/large.gguf").path.read_bytes() == LARGE


def test_object_that_was_replaced_is_not_mixed(raw_bucket: Any, pulls: Pulls) -> None:
    name = put(raw_bucket, "gguf", {"large.gguf": LARGE})
    puller = pulls.puller
    plan = puller.plan(ModelName.parse(f"{name}/large.gguf"))
    put(raw_bucket, "gguf", {"large.gguf": LARGE[::-1]})
    with pytest.raises(SourceUnavailable, match="replaced"):
        puller.carry_out(plan)
    assert pulls(f"{name}/large.gguf").path.read_bytes() == LARGE[::-1]


def test_absent_bucket_and_absent_model_are_named(raw_bucket: Any, pulls: Pulls) -> None:
    with pytest.raises(PullRefused, match=r"has no config\.json"):
        pulls(f"s3://{raw_bucket.name}/nothing")
    with pytest.raises(PullRefused, match=r"has no x\.gguf"):
        pulls(f"s3://{raw_bucket.name}/nothing/x.gguf")
    with pytest.raises(SourceUnavailable, match="does not exist"):
        pulls("s3://loramux-no-such-bucket/x")
