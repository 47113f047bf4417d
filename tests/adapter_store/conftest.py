from __future__ import annotations

import os
import threading
import uuid
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from loramux.adapter_store.blobs.blob_url import open_blob_store
from loramux.adapter_store.blobs.interface import BlobStore, canonical_key, packed_key
from loramux.adapter_store.blobs.s3_blobs import S3BlobStore
from loramux.adapter_store.formats.packed.canonical import write_canonical
from loramux.adapter_store.formats.packed.pack_target import PackTarget
from loramux.adapter_store.formats.packed.packed_file import write_packed
from loramux.adapter_store.formats.packed.packing import pack
from loramux.adapter_store.formats.quantization.base_weights import BaseWeights
from loramux.adapter_store.registry.registry import AdapterRegistry
from loramux.adapter_store.validation.validation import validate_files
from loramux.adapter_store.validation.validator import SubprocessValidator
from loramux.kernels.layout import LinearShape
from loramux.migrations.database import Database
from tests.adapter_store.adapter_files import AdapterMaker
from tests.adapter_store.blobs.fault_proxy import FaultProxy
from tests.adapter_store.blobs.limits import SMALL_PARTS
from tests.adapter_store.blobs.radosgw import ACCESS_KEY, IS_RADOSGW, SECRET_KEY, Radosgw
from tests.adapter_store.memory_blobs import MemoryBlobStore
from tests.adapter_store.small_base import FUSED_MODULES, OUTER_MODULES, make_target
from tests.adapter_store.stored_adapter import StoredAdapter
from tests.adapter_store.tenant_rows import add_tenant


@pytest.fixture
def target() -> PackTarget:
    return make_target()


@pytest.fixture(params=["float32", "bfloat16"])
def any_target(request: pytest.FixtureRequest) -> PackTarget:
    """The small base, once per pool dtype."""
    return make_target(request.param)


@pytest.fixture
def fused_target() -> PackTarget:
    """The small base with fused q/k/v and gate/up linear layers, as in Phi-3."""
    return make_target(modules=FUSED_MODULES)


@pytest.fixture(params=["float32", "bfloat16"])
def outer_target(request: pytest.FixtureRequest) -> PackTarget:
    """The small base with its embedding and head, once per pool dtype."""
    return make_target(request.param, outer_modules=OUTER_MODULES)


@pytest.fixture
def odd_target() -> PackTarget:
    """A base whose row lengths are not powers of two, so that rows need padding."""
    return make_target(modules=(LinearShape("self_attn.q_proj", 63, 1000), LinearShape("mlp.down_proj", 130, 63)))


@pytest.fixture
def make_adapter(target: PackTarget) -> AdapterMaker:
    return AdapterMaker(target)


@pytest.fixture
def adapter_maker() -> type[AdapterMaker]:
    return AdapterMaker


@pytest.fixture(scope="session")
def s3_endpoint(request: pytest.FixtureRequest) -> Iterator[str]:
    if not IS_RADOSGW:
        yield request.getfixturevalue("moto_endpoint")
        return
    server = Radosgw()
    yield server.url
    server.stop()


@pytest.fixture(scope="session")
def moto_endpoint() -> Iterator[str]:
    """The URL of a moto server, which checks neither signatures nor checksums."""
    from moto.s3.responses import S3Response
    from moto.server import ThreadedMotoServer

    put_object, turn = S3Response.put_object, threading.Lock()

    def put_one_at_a_time(self: Any) -> Any:
        # Between its check of `If-None-Match` and its write, moto lets another writer in. S3 does not.
        with turn:
            return put_object(self)

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(S3Response, "put_object", put_one_at_a_time)
        server.start()
        host, port = server.get_host_and_port()
        yield f"http://{host}:{port}"
        server.stop()


@pytest.fixture
def s3_environment(s3_endpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (
        ("AWS_ENDPOINT_URL", s3_endpoint),
        ("AWS_ACCESS_KEY_ID", ACCESS_KEY),
        ("AWS_SECRET_ACCESS_KEY", SECRET_KEY),
        ("AWS_DEFAULT_REGION", "us-east-1"),
        ("AWS_EC2_METADATA_DISABLED", "true"),
    ):
        monkeypatch.setenv(name, value)


@pytest.fixture(scope="session")
def s3_resource(s3_endpoint: str) -> Any:
    """A boto3 client that bypasses our code and the proxy."""
    import boto3

    return boto3.resource(
        "s3",
        endpoint_url=s3_endpoint,
        aws_access_key_id=ACCESS_KEY,
        aws_secret_access_key=SECRET_KEY,
        region_name="us-east-1",
    )


@pytest.fixture
def s3_bucket(s3_environment: None, s3_resource: Any) -> str:
    bucket = f"loramux-{uuid.uuid4().hex}"
    s3_resource.create_bucket(Bucket=bucket)
    return bucket


@pytest.fixture
def raw_bucket(s3_resource: Any, s3_bucket: str) -> Any:
    """A new bucket, through a boto3 client that bypasses our code and the proxy."""
    return s3_resource.Bucket(s3_bucket)


@pytest.fixture
def fault_proxy(s3_endpoint: str, s3_bucket: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultProxy]:
    """Stores opened later connect through the proxy, which injects no faults at first."""
    proxy = FaultProxy(s3_endpoint)
    monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.url)
    yield proxy
    proxy.stop()


EXTENSION_URL = os.environ.get("LORAMUX_TEST_BLOB_URL")
"""The URL of an extension's blob store, whose blobs the tests delete. It replaces the stores of loramux."""


@pytest.fixture(params=["memory", "local", "s3"] if EXTENSION_URL is None else ["extension"])
def blobs(request: pytest.FixtureRequest) -> BlobStore:
    if EXTENSION_URL is not None:
        store = open_blob_store(EXTENSION_URL)
        for key in list(store.list_keys()):
            store.delete(key)
        return store
    if request.param == "memory":
        return MemoryBlobStore()
    if request.param == "local":
        return open_blob_store(f"file://{request.getfixturevalue('tmp_path') / 'blobs'}")
    return S3BlobStore(request.getfixturevalue("s3_bucket"), "some/prefix", SMALL_PARTS)


@pytest.fixture
def memory_blobs() -> MemoryBlobStore:
    return MemoryBlobStore()


@pytest.fixture
def make_tenant(database: Database) -> Callable[[str], str]:
    return partial(add_tenant, database)


@pytest.fixture
def registry(database: Database) -> AdapterRegistry:
    return AdapterRegistry(database, reserved_names=["demo-base"])


@pytest.fixture
def store_adapter(make_adapter: AdapterMaker, target: PackTarget, tmp_path: Path) -> Callable[..., StoredAdapter]:
    """Puts a random adapter's canonical file, and optionally its packed file, into a blob store, as ingestion does."""

    def store(blobs: BlobStore, is_packed: bool = False, **adapter: Any) -> StoredAdapter:
        files = make_adapter(**adapter)
        canonical, packed_path = tmp_path / uuid.uuid4().hex, tmp_path / uuid.uuid4().hex
        report = validate_files(files.config_bytes, files.tensor_bytes, target)
        digest = write_canonical(files.tensor_bytes, report.scales, canonical)
        packed = pack(canonical, target, BaseWeights(tmp_path))
        write_packed(packed_path, packed, target)
        blobs.put(canonical_key(digest), canonical)
        if is_packed:
            blobs.put(packed_key(digest, target.pack_key, packed.base), packed_path)
        return StoredAdapter(digest, packed)

    return store


@pytest.fixture(scope="session")
def subprocess_validator() -> Iterator[SubprocessValidator]:
    """The real validator, at normal priority so that it does not starve on a busy machine."""
    validator = SubprocessValidator(niceness=0)
    yield validator
    validator.close()
