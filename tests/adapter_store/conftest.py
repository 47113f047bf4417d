"""A small base, adapters made for it with numpy, and every kind of blob store."""

from __future__ import annotations

import json
import os
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save

from loramux.adapter_store.blobs.blob_url import open_blob_store
from loramux.adapter_store.blobs.interface import BlobStore, canonical_key, packed_key
from loramux.adapter_store.blobs.memory import MemoryBlobStore
from loramux.adapter_store.blobs.s3_blobs import S3BlobStore
from loramux.adapter_store.blobs.s3_limits import MIN_PART_BYTES, S3Limits
from loramux.adapter_store.formats.canonical import write_canonical
from loramux.adapter_store.formats.file_names import CONFIG_FILE, TENSORS_FILE
from loramux.adapter_store.formats.pack_target import PackTarget
from loramux.adapter_store.formats.packed_file import write_packed
from loramux.adapter_store.formats.packing import PackedAdapter, pack
from loramux.adapter_store.ingest.claims import Verdict, VersionClaims
from loramux.adapter_store.ingest.upload_rows import UploadRows
from loramux.adapter_store.registry.records import AdapterVersion, UploadFile
from loramux.adapter_store.registry.registry import AdapterRegistry
from loramux.adapter_store.validation.validation import validate_files
from loramux.adapter_store.validation.validator import SubprocessValidator, Validator
from loramux.kernels.layout import LinearShape, PageGeometry
from loramux.migrations.database import Database
from tests.adapter_store.blobs.fault_proxy import FaultProxy
from tests.adapter_store.blobs.radosgw import ACCESS_KEY, SECRET_KEY, Radosgw
from tests.adapter_store.ingest.house import DirectValidator, House, add_tenant
from tests.adapter_store.linears import fused_linears, llama_linears, outer_linears

HOUR_US = 3_600_000_000
HIDDEN, HEADS, KV_HEADS, HEAD_DIM, INTERMEDIATE, NUM_LAYERS, VOCAB_SIZE = 32, 4, 2, 8, 48, 2, 70

FEATURES = (HIDDEN, HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM, INTERMEDIATE)

MODULES = llama_linears(*FEATURES)
FUSED_MODULES = fused_linears(*FEATURES)
OUTER_MODULES = outer_linears(VOCAB_SIZE, HIDDEN)


def tensor_name(layer: int, module: str, half: str) -> str:
    return f"base_model.model.model.layers.{layer}.{module}.lora_{half}.weight"


@dataclass
class AdapterFiles:
    """An adapter's two files, as PEFT would save them, open to any change."""

    config: dict[str, Any]
    tensors: dict[str, np.ndarray] = field(default_factory=dict)

    @property
    def config_bytes(self) -> bytes:
        return json.dumps(self.config).encode()

    @property
    def tensor_bytes(self) -> bytes:
        return save(self.tensors)


@dataclass(frozen=True)
class AdapterMaker:
    """Makes random adapters for a target."""

    target: PackTarget

    def __call__(
        self,
        seed: int = 0,
        rank: int = 4,
        modules: tuple[str, ...] = ("self_attn.q_proj", "self_attn.v_proj"),
        layers: tuple[int, ...] | None = None,
        ranks: Callable[[int, str], int] | None = None,
        dtype: Any = np.float32,
        **config: Any,
    ) -> AdapterFiles:
        """`ranks(layer, module)` gives other ranks than `rank`; they go into the configuration's rank_pattern."""
        generator = np.random.default_rng(seed)
        files = AdapterFiles(
            {
                "peft_type": "LORA",
                "task_type": "CAUSAL_LM",
                "base_model_name_or_path": "some/base",
                "bias": "none",
                "r": rank,
                "lora_alpha": 2 * rank,
                "target_modules": [name.rsplit(".", 1)[-1] for name in modules],
                **config,
            }
        )
        for shape in self.target.outer_modules:
            if shape.name in modules:
                half = "lora_embedding_{}" if shape.is_embedding else "lora_{}.weight"
                for letter, size in (("A", (rank, shape.in_features)), ("B", (shape.out_features, rank))):
                    name = f"base_model.model.{shape.name}.{half.format(letter)}"
                    files.tensors[name] = (generator.standard_normal(size) * 0.1).astype(dtype)
        for layer in range(self.target.geometry.num_layers):
            if layers is not None and layer not in layers:
                continue
            for shape in self.target.modules:
                if shape.name not in modules:
                    continue
                r = ranks(layer, shape.name) if ranks else rank
                if r != rank:
                    key = f"model.layers.{layer}.{shape.name}"
                    files.config.setdefault("rank_pattern", {})[key] = r
                A = generator.standard_normal((r, shape.in_features)) * 0.1
                B = generator.standard_normal((shape.out_features, r)) * 0.1
                files.tensors[tensor_name(layer, shape.name, "A")] = A.astype(dtype)
                files.tensors[tensor_name(layer, shape.name, "B")] = B.astype(dtype)
        return files


def make_target(
    dtype: str = "float32", modules: tuple[LinearShape, ...] = MODULES, outer_modules: tuple[LinearShape, ...] = ()
) -> PackTarget:
    geometry = PageGeometry(
        num_layers=NUM_LAYERS,
        num_kv_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        kv_itemsize=4,
        adapter_itemsize=4 if dtype == "float32" else 2,
    )
    return PackTarget(modules=modules, geometry=geometry, dtype=dtype, outer_modules=outer_modules)


@pytest.fixture
def target() -> PackTarget:
    return make_target()


@pytest.fixture(params=["float32", "bfloat16"])
def any_target(request: pytest.FixtureRequest) -> PackTarget:
    """The small base with a pool of each dtype."""
    return make_target(request.param)


@pytest.fixture
def fused_target() -> PackTarget:
    """The small base with q/k/v as one linear and gate/up as another, as Phi-3 has them."""
    return make_target(modules=FUSED_MODULES)


@pytest.fixture(params=["float32", "bfloat16"])
def outer_target(request: pytest.FixtureRequest) -> PackTarget:
    """The small base with its embedding and its head, and a pool of each dtype."""
    return make_target(request.param, outer_modules=OUTER_MODULES)


@pytest.fixture
def odd_target() -> PackTarget:
    """Rows whose lengths fit no power of two, so that they are padded."""
    return make_target(modules=(LinearShape("self_attn.q_proj", 63, 1000), LinearShape("mlp.down_proj", 130, 63)))


@pytest.fixture
def make_adapter(target: PackTarget) -> AdapterMaker:
    return AdapterMaker(target)


@pytest.fixture
def adapter_maker() -> type[AdapterMaker]:
    """For tests that bring their own target."""
    return AdapterMaker


IS_RADOSGW = os.environ.get("LORAMUX_TEST_S3") == "radosgw"
"""Whether the S3 tests run against Ceph's radosgw (`make test-s3`) in place of moto."""


@pytest.fixture(scope="session")
def s3_endpoint(request: pytest.FixtureRequest) -> Iterator[str]:
    """A real HTTP server that speaks S3."""
    if not IS_RADOSGW:
        yield request.getfixturevalue("moto_endpoint")
        return
    server = Radosgw()
    yield server.url
    server.stop()


@pytest.fixture(scope="session")
def moto_endpoint() -> Iterator[str]:
    """moto over HTTP: it checks neither signatures nor checksums."""
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    yield f"http://{host}:{port}"
    server.stop()


@pytest.fixture
def s3_environment(s3_endpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The variables by which boto3 finds the server."""
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
    """The server without us and without any proxy."""
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
    """A new bucket."""
    bucket = f"loramux-{uuid.uuid4().hex}"
    s3_resource.create_bucket(Bucket=bucket)
    return bucket


@pytest.fixture
def raw_bucket(s3_resource: Any, s3_bucket: str) -> Any:
    """The new bucket without us and without any proxy."""
    return s3_resource.Bucket(s3_bucket)


SMALL_PARTS = S3Limits(part_bytes=MIN_PART_BYTES)
"""Parts as small as S3 takes them, so that tests need not move much."""

HURRIED = S3Limits(
    connect_s=1.0,
    read_s=0.5,
    call_s=3.0,
    body_s=4.0,
    first_pause_s=0.01,
    max_pause_s=0.05,
    part_bytes=MIN_PART_BYTES,
)
"""Limits under which a test that waits for a hung store ends soon; for small blobs on a busy machine."""

PATIENT = S3Limits(read_s=2.0, first_pause_s=0.01, max_pause_s=0.05, part_bytes=MIN_PART_BYTES)
"""For large ones."""


@pytest.fixture
def fault_proxy(s3_endpoint: str, s3_bucket: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultProxy]:
    """A proxy before the S3 server, through which stores that are opened from here on go; harmless at first."""
    proxy = FaultProxy(s3_endpoint)
    monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.url)
    yield proxy
    proxy.stop()


def open_blobs(kind: str, request: pytest.FixtureRequest) -> BlobStore:
    if kind == "memory":
        return MemoryBlobStore()
    if kind == "local":
        return open_blob_store(f"file://{request.getfixturevalue('tmp_path') / 'blobs'}")
    return S3BlobStore(request.getfixturevalue("s3_bucket"), "some/prefix", SMALL_PARTS)


@pytest.fixture(params=["memory", "local", "s3"])
def blobs(request: pytest.FixtureRequest) -> BlobStore:
    """An empty blob store of each kind."""
    return open_blobs(request.param, request)


@pytest.fixture
def memory_blobs() -> MemoryBlobStore:
    return MemoryBlobStore()


@pytest.fixture
def make_tenant(database: Database) -> Callable[[str], str]:
    """Adds a tenant and returns its identifier."""
    return partial(add_tenant, database)


@dataclass(frozen=True)
class Versions:
    """Adds versions to an adapter without any bytes."""

    upload_rows: UploadRows
    claims: VersionClaims

    def add(self, adapter_id: str, mark: str, is_ready: bool = True, digest: str | None = None) -> AdapterVersion:
        files = [UploadFile(name, 1, mark * 64) for name in (CONFIG_FILE, TENSORS_FILE)]
        upload = self.upload_rows.open_upload(adapter_id, files, HOUR_US)
        version = self.upload_rows.add_version(adapter_id, upload.id).version
        assert self.claims.claim_version(version.id) is not None
        if is_ready:
            self.claims.accept(version, Verdict(digest or mark * 64, 8, 3, 1000, {"max_rank": 8}))
            self.claims.publish(version)
        else:
            self.claims.reject(version.id, {"error": {"code": "not_finite", "message": "NaN", "param": None}})
        return self.upload_rows.get_version(version.id)


@pytest.fixture
def registry(database: Database) -> AdapterRegistry:
    return AdapterRegistry(database, reserved_names=["demo-base"])


@pytest.fixture
def versions(database: Database) -> Versions:
    return Versions(UploadRows(database), VersionClaims(database))


@dataclass(frozen=True)
class StoredAdapter:
    """An adapter whose canonical file is in a blob store."""

    digest: str
    packed: PackedAdapter


@pytest.fixture
def store_adapter(make_adapter: AdapterMaker, target: PackTarget, tmp_path: Path) -> Callable[..., StoredAdapter]:
    """Puts a random adapter's canonical file, and on request its packed one, as ingestion does."""

    def store(blobs: BlobStore, is_packed: bool = False, **adapter: Any) -> StoredAdapter:
        files = make_adapter(**adapter)
        canonical, packed_path = tmp_path / uuid.uuid4().hex, tmp_path / uuid.uuid4().hex
        report = validate_files(files.config_bytes, files.tensor_bytes, target)
        digest = write_canonical(files.tensor_bytes, report.scales, canonical)
        packed = pack(canonical, target)
        write_packed(packed_path, packed, target)
        blobs.put(canonical_key(digest), canonical)
        if is_packed:
            blobs.put(packed_key(digest, target.pack_key), packed_path)
        return StoredAdapter(digest, packed)

    return store


@pytest.fixture(scope="session")
def subprocess_validator() -> Iterator[SubprocessValidator]:
    """The real one; not behind everything else on a machine that many tests keep busy."""
    validator = SubprocessValidator(niceness=0)
    yield validator
    validator.close()


@pytest.fixture
def open_house(
    database: Database, target: PackTarget, tmp_path: Path, make_tenant: Callable[[str], str]
) -> Callable[..., House]:
    """Opens a house with one tenant's adapter."""

    def open_one(blobs: BlobStore, validator: Validator | None = None) -> House:
        registry = AdapterRegistry(database)
        adapter = registry.create_adapter(make_tenant("acme"), "support")
        return House(registry, blobs, target, tmp_path / "scratch", validator or DirectValidator(), adapter.id)

    return open_one


@pytest.fixture
def house(open_house: Callable[..., House], memory_blobs: MemoryBlobStore) -> House:
    """One with blobs in memory."""
    return open_house(memory_blobs)
