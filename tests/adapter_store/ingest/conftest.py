from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from loramux.adapter_store.blobs.interface import BlobStore
from loramux.adapter_store.formats.packed.pack_target import PackTarget
from loramux.adapter_store.registry.registry import AdapterRegistry
from loramux.adapter_store.validation.validator import Validator
from loramux.migrations.database import Database
from tests.adapter_store.ingest.ingest_world import DirectValidator, IngestWorld
from tests.adapter_store.memory_blobs import MemoryBlobStore


@pytest.fixture
def open_world(
    database: Database, target: PackTarget, tmp_path: Path, make_tenant: Callable[[str], str]
) -> Callable[..., IngestWorld]:
    def open_one(blobs: BlobStore, validator: Validator | None = None) -> IngestWorld:
        registry = AdapterRegistry(database)
        adapter = registry.create_adapter(make_tenant("acme"), "support")
        return IngestWorld(registry, blobs, target, tmp_path / "scratch", validator or DirectValidator(), adapter.id)

    return open_one


@pytest.fixture
def world(open_world: Callable[..., IngestWorld], memory_blobs: MemoryBlobStore) -> IngestWorld:
    return open_world(memory_blobs)
