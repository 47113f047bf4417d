from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import httpx
import pytest

from tests.admin.rest.adapters.pushed_versions import FILES, declared, new_adapter, push

pytestmark = pytest.mark.anyio


async def test_pushed_adapter_becomes_ready_and_default(
    http: httpx.AsyncClient, make_adapter: Callable[..., Path]
) -> None:
    adapter_id = await new_adapter(http)
    version = await push(http, adapter_id, make_adapter(rank=3))
    assert (version["state"], version["number"], version["max_rank"]) == ("ready", 1, 3)
    assert len(version["digest"]) == 64
    assert version["error"] is None
    listed = (await http.get("/admin/v1/adapters", params={"tenant": "acme"})).json()
    assert [(item["model"], item["aliases"]) for item in listed["data"]] == [
        ("acme/support", {"default": [{"version": 1, "weight": 100}]})
    ]


async def test_identical_bytes_return_the_existing_version(
    http: httpx.AsyncClient, make_adapter: Callable[..., Path]
) -> None:
    adapter_id = await new_adapter(http)
    directory = make_adapter()
    first = await push(http, adapter_id, directory)
    again = await push(http, adapter_id, directory)
    assert (again["id"], again["number"]) == (first["id"], 1)


async def test_alias_moves_only_to_a_ready_version(http: httpx.AsyncClient, make_adapter: Callable[..., Path]) -> None:
    adapter_id = await new_adapter(http)
    await push(http, adapter_id, make_adapter())
    await push(http, adapter_id, make_adapter())
    base = f"/admin/v1/adapters/{adapter_id}"
    assert (await http.put(f"{base}/aliases/default", json={"version": 2})).status_code == 200
    assert (await http.get(f"{base}/aliases/default")).json()["targets"] == [{"version": 2, "weight": 100}]
    rejected = await push(http, adapter_id, make_adapter(config={"bias": "some"}))
    refused = await http.put(f"{base}/aliases/default", json={"version": rejected["number"]})
    assert (refused.status_code, refused.json()["error"]["code"]) == (409, "version_not_ready")
    missing = await http.put(f"{base}/aliases/default", json={"version": 9})
    assert (missing.status_code, missing.json()["error"]["code"]) == (404, "version_not_found")
    assert (await http.get(f"{base}/aliases/default")).json()["targets"] == [{"version": 2, "weight": 100}]


def truncated(directory: Path) -> None:
    path = directory / "adapter_model.safetensors"
    path.write_bytes(path.read_bytes()[:-7])


def pickled(directory: Path) -> None:
    (directory / "adapter_model.safetensors").write_bytes(b"\x80\x04\x95\x10\x00\x00\x00\x00\x00\x00\x00" * 10)


@pytest.mark.parametrize(
    ("options", "damage"),
    [
        pytest.param({"poison": float("nan")}, None, id="nan weights"),
        pytest.param({"config": {"r": 0}}, None, id="rank 0"),
        pytest.param({}, truncated, id="truncated"),
        pytest.param({}, pickled, id="pickle"),
        pytest.param({"config": {"bias": "some"}}, None, id="bias"),
    ],
)
async def test_invalid_adapter_is_rejected_with_a_code_and_leaves_no_blob(
    http: httpx.AsyncClient,
    admin_side: Any,
    make_adapter: Callable[..., Path],
    options: dict[str, Any],
    damage: Callable[[Path], None] | None,
) -> None:
    adapter_id = await new_adapter(http)
    directory = make_adapter(**options)
    if damage is not None:
        damage(directory)
    version = await push(http, adapter_id, directory)
    assert version["state"] == "rejected"
    assert version["digest"] is None
    assert set(version["error"]) == {"code", "message", "param"}
    assert version["error"]["code"]
    with anyio.fail_after(5):
        while list(admin_side.blobs.list_keys()):  # noqa: ASYNC110 - the worker is a thread
            await anyio.sleep(0.02)
    assert (await http.get(f"/admin/v1/adapters/{adapter_id}/aliases")).json()["data"] == []


@pytest.mark.parametrize(
    ("change", "code"),
    [
        pytest.param({"size": 0}, "invalid_size", id="empty"),
        pytest.param({"size": 10**15}, "file_too_large", id="petabyte"),
        pytest.param({"size": "10"}, "invalid_type", id="size as text"),
        pytest.param({"sha256": "zz"}, "invalid_sha256", id="no digest"),
        pytest.param({"name": "../../etc/passwd"}, "invalid_files", id="traversal"),
        pytest.param({"path": "/tmp"}, "unknown_parameter", id="unknown field"),
    ],
)
async def test_invalid_declaration_is_refused(
    http: httpx.AsyncClient, make_adapter: Callable[..., Path], change: dict[str, Any], code: str
) -> None:
    adapter_id = await new_adapter(http)
    files = declared(make_adapter())
    files[0].update(change)
    response = await http.post(f"/admin/v1/adapters/{adapter_id}/uploads", json={"files": files})
    assert (response.status_code, response.json()["error"]["code"]) == (400, code)


@pytest.mark.parametrize(
    ("content", "code"),
    [
        pytest.param(b"{}", "size_mismatch", id="too short"),
        pytest.param(b"x" * 100_000, "size_mismatch", id="too long"),
        pytest.param(None, "checksum_mismatch", id="other bytes"),
    ],
)
async def test_undeclared_bytes_are_refused(
    http: httpx.AsyncClient, make_adapter: Callable[..., Path], content: bytes | None, code: str
) -> None:
    adapter_id = await new_adapter(http)
    files = declared(make_adapter())
    upload = (await http.post(f"/admin/v1/adapters/{adapter_id}/uploads", json={"files": files})).json()
    body = b"x" * files[0]["size"] if content is None else content
    put = await http.put(upload["files"][0]["url"], content=body)
    assert (put.status_code, put.json()["error"]["code"]) == (400, code)
    version = await http.post(f"/admin/v1/adapters/{adapter_id}/versions", json={"upload_id": upload["id"]})
    assert (version.status_code, version.json()["error"]["code"]) == (400, "upload_incomplete")


async def test_upload_cannot_be_used_for_another_adapter(
    http: httpx.AsyncClient, make_adapter: Callable[..., Path]
) -> None:
    first, second = await new_adapter(http), await new_adapter(http, "globex", "other")
    directory = make_adapter()
    upload = (await http.post(f"/admin/v1/adapters/{first}/uploads", json={"files": declared(directory)})).json()
    elsewhere = upload["files"][0]["url"].replace(first, second)
    put = await http.put(elsewhere, content=(directory / FILES[0]).read_bytes())
    assert (put.status_code, put.json()["error"]["code"]) == (404, "upload_not_found")
    version = await http.post(f"/admin/v1/adapters/{second}/versions", json={"upload_id": upload["id"]})
    assert (version.status_code, version.json()["error"]["code"]) == (404, "upload_not_found")


@pytest.mark.parametrize(
    ("name", "code"),
    [
        pytest.param("Support", "invalid_name", id="upper case"),
        pytest.param("a/b", "invalid_name", id="slash"),
        pytest.param("а", "invalid_name", id="cyrillic homoglyph"),
        pytest.param("a\x00", "invalid_name", id="nul"),
        pytest.param("x" * 64, "invalid_name", id="too long"),
        pytest.param("the-base", "reserved_name", id="the base's name"),
    ],
)
async def test_adapter_names_are_slugs(http: httpx.AsyncClient, name: str, code: str) -> None:
    await http.post("/admin/v1/tenants", json={"slug": "acme"})
    response = await http.post("/admin/v1/adapters", json={"tenant": "acme", "name": name})
    assert (response.status_code, response.json()["error"]["code"]) == (400, code)


async def test_duplicate_adapter_name_conflicts(http: httpx.AsyncClient) -> None:
    await new_adapter(http)
    response = await http.post("/admin/v1/adapters", json={"tenant": "acme", "name": "support"})
    assert (response.status_code, response.json()["error"]["code"]) == (409, "adapter_exists")
