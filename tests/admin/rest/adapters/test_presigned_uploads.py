from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import boto3
import httpx
import numpy as np
import pytest
from safetensors.numpy import save_file
from sqlalchemy import select, update

from loramux.adapter_store.blobs.interface import BlobStore, upload_key
from loramux.adapter_store.blobs.s3_blobs import S3BlobStore
from loramux.adapter_store.blobs.s3_limits import MIN_PART_BYTES, S3Limits
from loramux.adapter_store.formats.packed.pack_target import PackTarget
from loramux.admin.client.client import AdminClient, AdminError, ServerUnreachable
from loramux.admin.client.push import push_adapter
from loramux.admin.serving.expired_rows import ExpiredRows
from loramux.kernels.layout import LinearShape, PageGeometry
from loramux.migrations.schema import idempotency_keys
from tests.adapter_store.waiting import wait_until
from tests.admin.admin_side import ADMIN_KEY, AdminSide

FILES = ("adapter_config.json", "adapter_model.safetensors")
SIZE = 4096


@pytest.fixture(scope="module")
def bucket() -> Iterator[str]:
    """A bucket on a local S3 server. Environment variables point boto3 to the server."""
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    with pytest.MonkeyPatch.context() as patch:
        for name, value in (
            ("AWS_ENDPOINT_URL", f"http://{host}:{port}"),
            ("AWS_ACCESS_KEY_ID", "test"),
            ("AWS_SECRET_ACCESS_KEY", "test"),
            ("AWS_DEFAULT_REGION", "us-east-1"),
            ("AWS_EC2_METADATA_DISABLED", "true"),
        ):
            patch.setenv(name, value)
        with closing(boto3.client("s3")) as client:
            client.create_bucket(Bucket="loramux-uploads")
        yield "loramux-uploads"
    server.stop()


@pytest.fixture
def admin_blobs(bucket: str, request: pytest.FixtureRequest) -> BlobStore:
    return S3BlobStore(
        bucket, request.node.name.partition("[")[0], S3Limits(part_bytes=MIN_PART_BYTES), is_presigning=True
    )


@pytest.fixture
def admin_target() -> PackTarget:
    """A target whose adapters can be larger than one part."""
    geometry = PageGeometry(num_layers=1, num_kv_heads=2, head_dim=16, kv_itemsize=4, adapter_itemsize=4)
    return PackTarget(modules=(LinearShape("self_attn.q_proj", SIZE, SIZE),), geometry=geometry, dtype="float32")


@pytest.fixture
def make_wide(tmp_path: Path) -> Callable[[int], Path]:
    """Write a PEFT directory for this target, with 32 KiB per rank."""

    def make(rank: int) -> Path:
        random = np.random.default_rng(rank)
        directory = tmp_path / f"wide-{rank}"
        directory.mkdir()
        name = "base_model.model.model.layers.0.self_attn.q_proj"
        tensors = {
            f"{name}.lora_A.weight": (random.standard_normal((rank, SIZE)) * 0.02).astype(np.float32),
            f"{name}.lora_B.weight": (random.standard_normal((SIZE, rank)) * 0.02).astype(np.float32),
        }
        save_file(tensors, directory / FILES[1])
        config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": ["q_proj"]}
        (directory / FILES[0]).write_text(json.dumps(config))
        return directory

    return make


@pytest.fixture
def client(admin_url: str) -> Iterator[AdminClient]:
    with AdminClient(admin_url, ADMIN_KEY) as client:
        client.post("tenants", {"slug": "acme"})
        yield client


def declare(client: AdminClient, directory: Path) -> dict[str, Any]:
    adapter = client.post("adapters", {"tenant": "acme", "name": "support"})
    return client.post(f"adapters/{adapter['id']}/uploads", {"files": declared(directory)})


def declared(directory: Path) -> list[dict[str, Any]]:
    contents = {name: (directory / name).read_bytes() for name in FILES}
    return [
        {"name": name, "size": len(data), "sha256": hashlib.sha256(data).hexdigest()} for name, data in contents.items()
    ]


def test_stored_response_expires_with_its_presigned_urls(
    client: AdminClient, make_wide: Callable[[int], Path], admin_side: AdminSide
) -> None:
    directory = make_wide(4)
    adapter = client.post("adapters", {"tenant": "acme", "name": "support"})
    headers = {"authorization": f"Bearer {ADMIN_KEY}", "idempotency-key": "once"}
    body = {"files": declared(directory)}
    url = f"{client.url}/admin/v1/adapters/{adapter['id']}/uploads"

    def call() -> dict[str, Any]:
        return dict(httpx.post(url, headers=headers, json=body, trust_env=False).raise_for_status().json())

    first = call()
    assert "X-Amz-Signature" in first["files"][0]["url"]
    assert call() == first
    query = select(idempotency_keys.c.expires_us)
    database = admin_side.services.database
    with database.read() as connection:
        assert connection.execute(query).scalar_one() // 1_000_000 == first["expires_at"]
    with database.write() as connection:
        connection.execute(update(idempotency_keys).values(expires_us=database.now_us(connection)))
    # The stored response expired with its upload, so the repeated call creates a new upload.
    assert call()["id"] != first["id"]
    with database.write() as connection:
        connection.execute(update(idempotency_keys).values(expires_us=database.now_us(connection)))
    assert ExpiredRows(admin_side.services.database).sweep()["idempotency_keys"] == 1


@pytest.mark.parametrize("rank", [4, 170], ids=["whole", "in parts"])
def test_push_sends_files_directly_to_the_bucket(
    client: AdminClient, make_wide: Callable[[int], Path], admin_side: Any, monkeypatch: pytest.MonkeyPatch, rank: int
) -> None:
    sent: list[tuple[str, str, bool]] = []
    request = httpx.Client.request

    def watched(self: httpx.Client, method: str, url: Any, **arguments: Any) -> httpx.Response:
        response = request(self, method, url, **arguments)
        if method == "PUT":
            sent.append((method, str(response.request.url.port), "authorization" in response.request.headers))
        return response

    monkeypatch.setattr(httpx.Client, "request", watched)
    directory = make_wide(rank)
    pushed = push_adapter(client, directory, "acme", "support")
    assert (pushed.version, pushed.max_rank) == (1, rank)
    server = str(urlsplit(str(client._http.base_url)).port)
    num_parts = -(-(directory / FILES[1]).stat().st_size // MIN_PART_BYTES)
    assert (num_parts > 1) == (rank == 170)
    assert len(sent) == 1 + num_parts
    assert all(port != server and not has_key for _, port, has_key in sent), "our API key is not sent to the store"
    adapter_id = client.get("adapters", tenant="acme")["data"][0]["id"]
    for name in FILES:
        url = f"{client.url}/admin/v1/adapters/{adapter_id}/versions/1/files/{name}"
        assert client._http.get(url).content == (directory / name).read_bytes()
    wait_until(lambda: not list(admin_side.blobs.list_keys("uploads/")))


def test_bytes_that_differ_from_the_declaration_are_rejected(
    client: AdminClient, make_wide: Callable[[int], Path], admin_side: Any
) -> None:
    directory = make_wide(4)
    upload = declare(client, directory)
    versions = f"adapters/{upload['adapter_id']}/versions"
    ways = {file["name"]: file for file in upload["files"]}
    assert ways[FILES[0]]["method"] == "PUT"
    with pytest.raises(AdminError) as refused:
        client.post(versions, {"upload_id": upload["id"]})
    assert refused.value.code == "upload_incomplete"
    client.put_presigned(ways[FILES[0]], [(directory / FILES[0]).read_bytes()])
    data = (directory / FILES[1]).read_bytes()
    # The local S3 server does not verify checksums, so it accepts wrong bytes of the right length.
    client.put_presigned(ways[FILES[1]], [data[:-1] + b"?"])
    version = client.post(versions, {"upload_id": upload["id"]})
    wait_until(lambda: client.get(f"{versions}/{version['number']}")["state"] == "rejected")
    assert client.get(f"{versions}/{version['number']}")["error"]["code"] == "checksum_mismatch"
    wait_until(lambda: not list(admin_side.blobs.list_keys()))


def test_reusing_a_presigned_url_does_not_change_a_validated_version(
    client: AdminClient, make_wide: Callable[[int], Path], admin_side: Any
) -> None:
    directory = make_wide(4)
    upload = declare(client, directory)
    ways = {file["name"]: file for file in upload["files"]}
    for name in FILES:
        client.put_presigned(ways[name], [(directory / name).read_bytes()])
    version = client.post(f"adapters/{upload['adapter_id']}/versions", {"upload_id": upload["id"]})
    url = f"adapters/{upload['adapter_id']}/versions/{version['number']}"
    wait_until(lambda: client.get(url)["state"] == "ready")
    version = client.get(url)
    wait_until(lambda: not list(admin_side.blobs.list_keys("uploads/")))
    data = (directory / FILES[1]).read_bytes()
    client.put_presigned(ways[FILES[1]], [data[:-1] + b"?"])
    assert client.get(url)["digest"] == version["digest"]
    with pytest.raises(AdminError) as refused:
        client.post(f"adapters/{upload['adapter_id']}/versions", {"upload_id": new_upload_like(client, upload)})
    assert refused.value.code == "upload_incomplete"
    admin_side.services.adapters.ingest.remove_abandoned()
    assert not [key for key in admin_side.blobs.list_keys("uploads/") if upload["id"] in key]


def new_upload_like(client: AdminClient, upload: dict[str, Any]) -> str:
    files = [{name: file[name] for name in ("name", "size", "sha256")} for file in upload["files"]]
    return str(client.post(f"adapters/{upload['adapter_id']}/uploads", {"files": files})["id"])


def test_missing_parts_leave_the_upload_incomplete(
    client: AdminClient, make_wide: Callable[[int], Path], admin_side: Any
) -> None:
    directory = make_wide(170)
    upload = declare(client, directory)
    ways = {file["name"]: file for file in upload["files"]}
    client.put_presigned(ways[FILES[0]], [(directory / FILES[0]).read_bytes()])
    data, size = (directory / FILES[1]).read_bytes(), ways[FILES[1]]["part_size"]
    client.put_presigned(ways[FILES[1]]["parts"][0], [data[:size]])
    versions = f"adapters/{upload['adapter_id']}/versions"
    with pytest.raises(AdminError) as refused:
        client.post(versions, {"upload_id": upload["id"]})
    assert refused.value.code == "upload_incomplete"
    for number, part in enumerate(ways[FILES[1]]["parts"]):
        client.put_presigned(part, [data[number * size : (number + 1) * size]])
    assert client.post(versions, {"upload_id": upload["id"]})["number"] == 1
    assert client.post(versions, {"upload_id": upload["id"]})["number"] == 1, "a repeated request returns it"


def test_files_can_still_be_sent_through_the_server(
    client: AdminClient, make_wide: Callable[[int], Path], admin_side: Any
) -> None:
    directory = make_wide(4)
    upload = declare(client, directory)
    own = f"/admin/v1/adapters/{upload['adapter_id']}/uploads/{upload['id']}/files"
    ways = {file["name"]: file for file in upload["files"]}
    client.put_presigned(ways[FILES[0]], [b"?" * ways[FILES[0]]["size"]])
    for name in FILES:
        client.put_bytes(f"{own}/{name}", ways[name]["size"], [(directory / name).read_bytes()])
    stored = admin_side.blobs.read_bytes(upload_key(upload["id"], FILES[0]))
    assert stored == (directory / FILES[0]).read_bytes(), "the stored file is the acknowledged one"


def test_refusing_store_is_distinguished_from_an_unreachable_one(
    client: AdminClient, make_wide: Callable[[int], Path]
) -> None:
    way = {"url": "http://127.0.0.1:9/secret?X-Amz-Signature=abc", "method": "PUT", "headers": {"content-length": "1"}}
    with pytest.raises(ServerUnreachable) as unreachable:
        client.put_presigned(way, [b"x"])
    assert "abc" not in str(unreachable.value)
    way["url"] = f"{client.url}/nothing"
    with pytest.raises(AdminError) as refused:
        client.put_presigned(way, [b"x"])
    assert (refused.value.status, refused.value.code) == (404, "blob_store_refused")


def test_cancelled_upload_leaves_no_parts(client: AdminClient, make_wide: Callable[[int], Path], bucket: str) -> None:
    directory = make_wide(200)
    upload = declare(client, directory)
    way = next(file for file in upload["files"] if file["name"] == FILES[1])
    client.put_presigned(way["parts"][0], [(directory / FILES[1]).read_bytes()[: way["part_size"]]])
    with closing(boto3.client("s3")) as s3:

        def has_parts() -> bool:
            found = s3.list_multipart_uploads(Bucket=bucket).get("Uploads", [])
            return any(upload["id"] in item["Key"] for item in found)

        assert has_parts()
        client.delete(f"adapters/{upload['adapter_id']}/uploads/{upload['id']}")
        assert not has_parts()
