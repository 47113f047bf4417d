from __future__ import annotations

import secrets
from collections.abc import AsyncIterator, Iterator
from typing import Any

import anyio
import httpx
import pytest
from fastapi import FastAPI
from sqlalchemy import func, select, update

from loramux.adapter_store.formats.files.file_names import CONFIG_FILE, TENSORS_FILE
from loramux.admin.serving.app import create_admin_app
from loramux.migrations.schema import adapter_versions, uploads
from tests.adapter_store.validation.hostile import MARK, TARGET, Hostile, good_files
from tests.adapter_store.validation.hostile_configs import NAMES, TYPES
from tests.adapter_store.validation.hostile_containers import FOREIGN, OFFSETS
from tests.adapter_store.validation.hostile_weights import COMBINATIONS, NUMBERS
from tests.admin.admin_side import ADMIN_KEY, AdminSide, open_admin_side
from tests.admin.rest.adapters.hostile_calls import CALLS, HostileCall, Visit
from tests.platform.scripted_engine import ScriptedEngine

pytestmark = pytest.mark.anyio

OF_EACH_FAMILY = [family[0] for family in (TYPES, NAMES, FOREIGN[3:], OFFSETS, COMBINATIONS, NUMBERS)]


@pytest.fixture(scope="module")
def admin_side(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AdminSide]:
    """The admin side shared by these tests. Each test has its own adapters."""
    with open_admin_side(tmp_path_factory.mktemp("hostile"), TARGET) as side:
        yield side


@pytest.fixture(scope="module")
def app(admin_side: AdminSide) -> FastAPI:
    return create_admin_app(admin_side.services)


@pytest.fixture
async def visit(app: FastAPI, admin_side: AdminSide) -> AsyncIterator[Visit]:
    headers = {"authorization": f"Bearer {ADMIN_KEY}"}
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://admin", headers=headers) as http:
        yield await arrive(http, admin_side)
    engine = admin_side.engine
    assert isinstance(engine, ScriptedEngine)
    assert (engine.adds, engine.aborts, engine.resident, engine.pinned) == ([], [], {}, set())


async def arrive(http: httpx.AsyncClient, admin_side: AdminSide) -> Visit:
    adapters = []
    for tenant in ("acme", "globex"):
        await http.post("/admin/v1/tenants", json={"slug": tenant})
        made = await http.post("/admin/v1/adapters", json={"tenant": tenant, "name": secrets.token_hex(8)})
        adapters.append(made.json()["id"])
    key = await http.post("/admin/v1/api_keys", json={"tenant": "globex", "scopes": ["tenant:admin"]})
    assert key.status_code == 201, key.text

    def expire(upload_id: str) -> None:
        with admin_side.services.database.write() as connection:
            connection.execute(update(uploads).where(uploads.c.id == upload_id).values(expires_us=1))

    files = good_files()
    contents = {CONFIG_FILE: files.config_bytes, TENSORS_FILE: files.tensor_bytes}
    return Visit(http, adapters[0], adapters[1], key.json()["secret"], contents, expire)


def num_versions(admin_side: AdminSide, visit: Visit) -> int:
    adapters = (visit.adapter_id, visit.foreign_adapter_id)
    count = select(func.count()).select_from(adapter_versions).where(adapter_versions.c.adapter_id.in_(adapters))
    with admin_side.services.database.read() as connection:
        return int(connection.execute(count).scalar_one())


def test_hostile_call_names_are_unique() -> None:
    assert len({call.name for call in CALLS}) == len(CALLS)


@pytest.mark.parametrize("hostile", CALLS, ids=lambda hostile: hostile.name)
async def test_hostile_call_is_refused(visit: Visit, admin_side: AdminSide, hostile: HostileCall) -> None:
    response = await hostile.call(visit)
    error = response.json()["error"]
    assert (response.status_code, error["code"]) == (hostile.status, hostile.code)
    assert len(error["message"]) < 300
    assert MARK not in error["message"].lower()
    assert num_versions(admin_side, visit) == 0
    keys = list(admin_side.blobs.list_keys())
    for key in keys:
        admin_side.blobs.delete(key)
    assert tuple(key.rsplit("/", 1)[-1] for key in keys) == hostile.leaves


async def push(visit: Visit, contents: dict[str, bytes]) -> dict[str, Any]:
    guest = Visit(visit.http, visit.adapter_id, visit.foreign_adapter_id, visit.foreign_key, contents, visit.expire)
    upload = await guest.upload()
    await guest.put_all(upload)
    answer = await guest.use({"upload_id": upload["id"]})
    assert answer.status_code == 202, answer.text
    version = answer.json()
    with anyio.fail_after(30):
        while version["state"] in ("pending", "validating"):
            await anyio.sleep(0.05)
            answer = await visit.http.get(f"/admin/v1/adapters/{visit.adapter_id}/versions/{version['number']}")
            version = answer.json()
    return dict(version)


async def wait_for_no_blobs(admin_side: AdminSide) -> None:
    with anyio.fail_after(5):
        while list(admin_side.blobs.list_keys()):  # noqa: ASYNC110 - the worker is a thread
            await anyio.sleep(0.02)


@pytest.mark.parametrize("hostile", OF_EACH_FAMILY, ids=lambda hostile: hostile.name)
async def test_hostile_files_leave_one_rejected_row(visit: Visit, admin_side: AdminSide, hostile: Hostile) -> None:
    """The real validation process rejects the files. Only the row and its report remain."""
    config, tensors = hostile.files()
    version = await push(visit, {CONFIG_FILE: config, TENSORS_FILE: tensors})
    assert (version["state"], version["digest"], version["number"]) == ("rejected", None, 1)
    assert (version["error"]["code"], version["error"]["param"]) == (hostile.code, hostile.param)
    assert MARK not in version["error"]["message"]
    assert num_versions(admin_side, visit) == 1
    await wait_for_no_blobs(admin_side)
    aliases = await visit.http.get(f"/admin/v1/adapters/{visit.adapter_id}/aliases")
    assert aliases.json()["data"] == []


async def test_upload_is_used_once(visit: Visit, admin_side: AdminSide) -> None:
    """A second call returns the version created by the first, and the files cannot be sent again."""
    files = good_files(bias="some")
    contents = {CONFIG_FILE: files.config_bytes, TENSORS_FILE: files.tensor_bytes}
    guest = Visit(visit.http, visit.adapter_id, visit.foreign_adapter_id, visit.foreign_key, contents, visit.expire)
    upload = await guest.upload()
    await guest.put_all(upload)
    first, second = [await guest.use({"upload_id": upload["id"]}) for _ in range(2)]
    assert (second.status_code, second.json()["id"]) == (202, first.json()["id"])
    put = await guest.put(upload, TENSORS_FILE, contents[TENSORS_FILE])
    assert (put.status_code, put.json()["error"]["code"]) == (400, "upload_used")
    assert num_versions(admin_side, visit) == 1
    await wait_for_no_blobs(admin_side)


async def test_valid_adapters_report_is_returned(visit: Visit, admin_side: AdminSide) -> None:
    version = await push(visit, visit.contents)
    assert version["state"] == "ready"
    for key in list(admin_side.blobs.list_keys()):
        admin_side.blobs.delete(key)
    report = version["report"]
    assert [check["outcome"] for check in report["checks"]] == ["passed"] * 8
    assert report["modules"]["self_attn.q_proj"]["ranks"] == [4, 4]
    assert report["modules"]["self_attn.q_proj"]["largest_effect"] > 0
    assert report["warnings"] == []
    assert report["usage"]["max_address_bytes"] < 512 << 20
