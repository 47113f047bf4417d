from __future__ import annotations

import json
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from loramux.adapter_store.blobs.interface import BlobStore, canonical_key
from loramux.adapter_store.errors import AdapterCorrupt, AdapterRejected, FileNotFound, OriginalNotKept, VersionNotReady
from loramux.adapter_store.formats.files.file_names import CONFIG_FILE, TENSORS_FILE
from loramux.adapter_store.formats.packed.canonical import CanonicalAdapter, write_canonical
from loramux.adapter_store.ingest.export import VersionExport
from loramux.adapter_store.ingest.originals import KeptHeader, config_key, header_key
from loramux.adapter_store.registry.records import AdapterVersion
from loramux.adapter_store.registry.version_states import VersionStates
from loramux.migrations.database import Database
from tests.adapter_store.ingest.ingest_world import IngestWorld


@pytest.fixture
def export(database: Database, world: IngestWorld, tmp_path: Path) -> VersionExport:
    return VersionExport(database, world.blobs, tmp_path / "export")


def content(export: VersionExport, version: AdapterVersion, name: str) -> bytes:
    with export.open(version, name) as file:
        return b"".join(file.chunks())


def in_order(files: Any, names: list[str], metadata: dict[str, str]) -> bytes:
    """Return a safetensors file with tensors in the given order, which libraries do not preserve."""
    document: dict[str, Any] = {"__metadata__": metadata}
    position, data = 0, b""
    for name in names:
        part = files.tensors[name].tobytes()
        document[name] = {
            "data_offsets": [position, position + len(part)],
            "shape": list(files.tensors[name].shape),
            "dtype": {"<f4": "F32", "<f2": "F16"}[files.tensors[name].dtype.str],
        }
        position, data = position + len(part), data + part
    header = json.dumps(document, indent=1).encode()
    return len(header).to_bytes(8, "little") + header + data


def shuffled(files: Any) -> bytes:
    return in_order(files, sorted(files.tensors, key=lambda name: name[::-1]), {"format": "pt", "note": "é"})


def with_equal_tensors(files: Any) -> bytes:
    first, *others = [name for name in sorted(files.tensors) if name.endswith("q_proj.lora_A.weight")]
    for name in others:
        files.tensors[name] = files.tensors[first].copy()
    return in_order(files, sorted(files.tensors, reverse=True), {})


def with_older_names(files: Any) -> bytes:
    """Rename the tensors to older PEFT names. The canonical file uses the current names."""
    files.tensors = {
        name.replace(".weight", ".default.weight"): tensor for name, tensor in reversed(files.tensors.items())
    }
    return in_order(files, list(files.tensors), {})


@pytest.mark.parametrize(
    ("tensors", "adapter"),
    [
        pytest.param(with_older_names, {}, id="older names"),
        pytest.param(lambda files: files.tensor_bytes, {}, id="as peft saves it"),
        pytest.param(lambda files: files.tensor_bytes, {"dtype": np.float16}, id="float16"),
        pytest.param(shuffled, {}, id="another order"),
        pytest.param(with_equal_tensors, {}, id="equal tensors"),
        pytest.param(shuffled, {"layers": (1,), "layers_to_transform": [1]}, id="one layer"),
    ],
)
@pytest.mark.parametrize("state", ["ready", "archived"])
@pytest.mark.parametrize("migrated_url", ["sqlite"], indirect=True)
def test_uploaded_files_are_exported_unchanged(
    world: IngestWorld,
    make_adapter: Any,
    export: VersionExport,
    database: Database,
    tensors: Callable[[Any], bytes],
    adapter: Any,
    state: str,
) -> None:
    world.push(make_adapter(seed=9))
    files = make_adapter(**adapter)
    data = tensors(files)
    config = json.dumps(files.config, indent=3).encode()
    upload = world.upload(config, data)
    version = world.ingest.process(world.ingest.create_version(world.adapter_id, upload.id).id)
    if state == "archived":
        version = VersionStates(database, world.registry).archive(world.adapter_id, version.number)
    assert version.state == state, version.report
    assert content(export, version, CONFIG_FILE) == config
    assert content(export, version, TENSORS_FILE) == data
    assert [(file.name, file.size) for file in export.files(version)] == [
        (CONFIG_FILE, len(config)),
        (TENSORS_FILE, len(data)),
    ]
    assert list(export.scratch_dir.iterdir()) == [], "the temporary copy has no name"


@pytest.mark.parametrize("migrated_url", ["sqlite"], indirect=True)
def test_files_are_exported_from_every_store(
    open_world: Callable[..., IngestWorld], blobs: BlobStore, make_adapter: Any, database: Database, tmp_path: Path
) -> None:
    world = open_world(blobs)
    files = make_adapter()
    version = world.push(files)
    export = VersionExport(database, blobs, tmp_path / "export")
    assert content(export, version, CONFIG_FILE) == files.config_bytes
    assert content(export, version, TENSORS_FILE) == files.tensor_bytes


@pytest.mark.parametrize("migrated_url", ["sqlite"], indirect=True)
def test_only_ready_versions_are_exported(
    world: IngestWorld, make_adapter: Any, export: VersionExport, database: Database
) -> None:
    version = world.push(make_adapter())
    with pytest.raises(FileNotFound):
        export.open(version, "../../etc/passwd")
    quarantined = VersionStates(database, world.registry).quarantine(world.adapter_id, 1)
    with pytest.raises(VersionNotReady):
        export.open(quarantined, CONFIG_FILE)
    rejected = world.push(make_adapter(seed=1, bias="some"))
    with pytest.raises(VersionNotReady):
        export.open(rejected, CONFIG_FILE)
    upload = world.upload(make_adapter(seed=2).config_bytes, make_adapter(seed=2).tensor_bytes)
    pending = world.ingest.create_version(world.adapter_id, upload.id)
    with pytest.raises(VersionNotReady):
        export.open(pending, TENSORS_FILE)


@pytest.mark.parametrize("migrated_url", ["sqlite"], indirect=True)
def test_version_without_stored_originals_raises_original_not_kept(
    world: IngestWorld, make_adapter: Any, export: VersionExport
) -> None:
    version = world.push(make_adapter())
    for key in (config_key(version.id), header_key(version.id)):
        world.blobs.delete(key)
    for name in (CONFIG_FILE, TENSORS_FILE):
        with pytest.raises(OriginalNotKept):
            export.open(version, name)


def changed(data: bytes) -> bytes:
    return data[:-1] + bytes([data[-1] ^ 1])


@pytest.mark.parametrize("migrated_url", ["sqlite"], indirect=True)
@pytest.mark.parametrize(
    ("key", "name"),
    [
        pytest.param(lambda version: config_key(version.id), CONFIG_FILE, id="configuration"),
        pytest.param(lambda version: canonical_key(version.digest), TENSORS_FILE, id="canonical file"),
    ],
)
@pytest.mark.parametrize("damage", [changed, lambda data: data[:-5], lambda data: b""], ids=["bit", "short", "empty"])
def test_wrong_bytes_are_never_exported(
    world: IngestWorld,
    make_adapter: Any,
    export: VersionExport,
    key: Callable[[AdapterVersion], str],
    name: str,
    damage: Callable[[bytes], bytes],
) -> None:
    version = world.push(make_adapter())
    data = world.blobs.read_bytes(key(version))
    world.blobs.delete(key(version))
    world.blobs.put(key(version), damage(data))
    with pytest.raises(AdapterCorrupt):
        export.open(version, name)
    assert not export.scratch_dir.exists() or list(export.scratch_dir.iterdir()) == []


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(b"", id="empty"),
        pytest.param(b"\x02" + bytes(7) + b"{}", id="no ranges"),
        pytest.param(b"\x02" + bytes(7) + b"{}nonsense", id="no JSON"),
        pytest.param(b"\x02" + bytes(7) + b'{}{"ranges": [[1]]}', id="no pair"),
        pytest.param(b"\xff" * 8 + b"{}", id="endless"),
    ],
)
def test_a_damaged_header_is_corrupt(data: bytes) -> None:
    with pytest.raises(AdapterCorrupt):
        KeptHeader.decode(data)


def test_canonical_file_without_a_tensor_is_detected(make_adapter: Any, tmp_path: Path) -> None:
    full, part = make_adapter(), make_adapter(layers=(0,))
    (tmp_path / "full").write_bytes(full.tensor_bytes)
    write_canonical(part.tensor_bytes, {}, tmp_path / "canonical")
    with pytest.raises(AdapterCorrupt):
        KeptHeader.of(tmp_path / "full", tmp_path / "canonical")
    (tmp_path / "not one").write_bytes(b"x" * 100)
    with pytest.raises(AdapterRejected):
        KeptHeader.of(tmp_path / "not one", tmp_path / "canonical")


def test_export_buffers_only_one_chunk(make_adapter: Any, tmp_path: Path) -> None:
    num_bytes = 24 << 20
    random = np.random.default_rng(0)
    files = make_adapter(layers=(0,), modules=("self_attn.q_proj",))
    name, other = sorted(files.tensors)
    files.tensors[name] = random.standard_normal((num_bytes // 128, 32)).astype(np.float32)
    data = in_order(files, [other, name], {})
    (tmp_path / "tensors").write_bytes(data)
    write_canonical(tmp_path / "tensors", {}, tmp_path / "canonical")
    tracemalloc.start()
    kept = KeptHeader.of(tmp_path / "tensors", tmp_path / "canonical")
    num_read = 0
    with (tmp_path / "canonical").open("rb") as canonical:
        for chunk in kept.rebuild(canonical):
            num_read += len(chunk)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert num_read == len(data)
    assert len(kept.ranges) == 2, "neighbours in the wrong order"
    assert peak < 4 << 20
    with CanonicalAdapter(tmp_path / "canonical") as file:
        assert sorted(file.header.tensors) == [name, other]
