"""Pushes: a version from one form, with the alias that it moves and the requests that it stops."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import anyio
import httpx
import pytest

from loramux.adapter_store.blobs.interface import packed_key
from loramux.adapter_store.errors import BlobStoreUnavailable, ValidationFailed, WeightsBeingPurged
from loramux.adapter_store.tiers.disk_tier import DiskTier
from loramux.adapter_store.validation.peft_config import MAX_CONFIG_BYTES
from loramux.migrations.identifiers import new_id
from loramux.platform.admission.admission import Admission
from loramux.platform.admission.records import ReservationRequest
from tests.adapter_store.waiting import wait_until
from tests.admin.admin_side import ADMIN_KEY, TARGET, AdminSide
from tests.admin.rest.adapters.pushed_versions import FILES, new_adapter
from tests.admin.rest.adapters.test_intake_limits import tenants_client
from tests.admin.running_server import RunningServer

pytestmark = pytest.mark.anyio


def form_of(directory: Path) -> dict[str, tuple[str, bytes]]:
    return {name: (name, (directory / name).read_bytes()) for name in FILES}


async def send(
    http: httpx.AsyncClient, adapter_id: str, files: Mapping[str, tuple[str, bytes]], **params: Any
) -> httpx.Response:
    return await http.put(f"/admin/v1/adapters/{adapter_id}/push", files=dict(files), params=params)


def code_of(response: httpx.Response) -> tuple[int, str | None]:
    return response.status_code, response.json()["error"]["code"]


async def test_a_push_is_ready_when_it_returns_and_moves_the_alias_alone(
    http: httpx.AsyncClient, admin_side: AdminSide, make_adapter: Callable[..., Path]
) -> None:
    adapter_id = await new_adapter(http)
    first = (await send(http, adapter_id, form_of(make_adapter(rank=3)))).json()
    assert (first["state"], first["number"], first["max_rank"], first["model"], first["alias"]) == (
        "ready",
        1,
        3,
        "acme/support@1",
        None,
    )
    directory = make_adapter()
    second = await send(http, adapter_id, form_of(directory), alias="default", wait="resident")
    assert second.status_code == 200, second.text
    assert second.json()["alias"]["targets"] == [{"version": 2, "weight": 100}]
    assert second.json()["digest"] in admin_side.engine.resident
    again = (await send(http, adapter_id, form_of(directory), alias="default")).json()
    assert (again["id"], again["number"]) == (second.json()["id"], 2)
    # The canonical file and what an export needs are stored, and nothing else is left of the push.
    export = await http.get(f"/admin/v1/adapters/{adapter_id}/versions/2/files/adapter_model.safetensors")
    assert export.content == (directory / FILES[1]).read_bytes()
    assert not [key for key in admin_side.blobs.list_keys() if key.startswith("uploads/")]
    assert (await http.get(f"/admin/v1/adapters/{adapter_id}/uploads")).json()["data"] == []
    log = (await http.get("/admin/v1/audit_log")).json()["data"]
    assert [entry["action"] for entry in log].count("version.create") == 2
    assert "alias.set" in {entry["action"] for entry in log}


def part(name: str, content: bytes) -> bytes:
    return f'--b\r\nContent-Disposition: form-data; name="{name}"; filename="x"\r\n\r\n'.encode() + content + b"\r\n"


def form(*files: tuple[str, bytes]) -> bytes:
    return b"".join(part(*file) for file in files) + b"--b--\r\n"


CONFIG, TENSORS = (FILES[0], b"{}"), (FILES[1], b"x" * 100)
FORM = {"content-type": "multipart/form-data; boundary=b"}


@pytest.mark.parametrize(
    ("body", "headers", "code"),
    [
        pytest.param(form(CONFIG), FORM, "invalid_files", id="no weights"),
        pytest.param(form(TENSORS), FORM, "invalid_files", id="no configuration"),
        pytest.param(form(CONFIG, TENSORS, TENSORS), FORM, "invalid_files", id="weights twice"),
        pytest.param(form(CONFIG, TENSORS, ("../../etc/passwd", b"x")), FORM, "invalid_files", id="path"),
        pytest.param(form(CONFIG, TENSORS, ("", b"x")), FORM, "invalid_files", id="no name"),
        pytest.param(form(CONFIG, (FILES[1], b"")), FORM, "invalid_size", id="empty file"),
        pytest.param(
            form((FILES[0], b" " * (MAX_CONFIG_BYTES + 1)), TENSORS), FORM, "file_too_large", id="large configuration"
        ),
        pytest.param(form(CONFIG, TENSORS), {"content-type": "application/json"}, "invalid_value", id="no form"),
        pytest.param(form(CONFIG, TENSORS)[:-5], FORM, "invalid_form", id="cut form"),
        pytest.param(b"--c\r\n" + form(CONFIG, TENSORS), FORM, "invalid_form", id="other boundary"),
        pytest.param(
            form(CONFIG, TENSORS), {**FORM, "content-encoding": "gzip"}, "unsupported_content_encoding", id="gzip"
        ),
        pytest.param(form(CONFIG, TENSORS), {**FORM, "content-length": "9" * 17}, "file_too_large", id="petabytes"),
        pytest.param(b"", {**FORM, "content-length": "0"}, "file_too_large", id="no body"),
        pytest.param(form(CONFIG, TENSORS), FORM, "invalid_config", id="no adapter"),
    ],
)
async def test_bad_forms_are_refused_and_leave_nothing(
    http: httpx.AsyncClient, admin_side: AdminSide, tmp_path: Path, body: bytes, headers: dict[str, str], code: str
) -> None:
    adapter_id = await new_adapter(http)
    response = await http.put(f"/admin/v1/adapters/{adapter_id}/push", content=body, headers=headers)
    assert response.status_code in (400, 415), response.text
    assert response.json()["error"]["code"] == code
    assert (await http.get(f"/admin/v1/adapters/{adapter_id}/uploads")).json()["data"] == []
    assert not list(admin_side.blobs.list_keys())
    assert not list((tmp_path / "scratch").glob("*"))


async def test_a_push_needs_a_length_and_room_in_the_quota(
    http: httpx.AsyncClient, admin_side: AdminSide, make_adapter: Callable[..., Path]
) -> None:
    adapter_id = await new_adapter(http)

    async def body() -> Any:
        yield form(CONFIG, TENSORS)

    path = f"/admin/v1/adapters/{adapter_id}/push"
    assert code_of(await http.put(path, content=body(), headers=FORM)) == (400, "missing_content_length")
    quota = {"tenant": "acme", "metric": "adapter_bytes", "limit": 500}
    assert (await http.post("/admin/v1/quotas", json=quota)).status_code == 200
    read: list[int] = []

    async def unread() -> Any:
        read.append(1)
        yield b"x" * 1000

    headers = {**FORM, "content-length": "1000"}
    refused = await http.put(path, content=unread(), headers=headers)
    assert refused.status_code == 429
    assert not read


async def test_rejected_weights_leave_the_alias_and_step_301_goes_on(
    http: httpx.AsyncClient, make_adapter: Callable[..., Path]
) -> None:
    """An adapter that turns NaN at step 300 of its training."""
    adapter_id = await new_adapter(http)
    await send(http, adapter_id, form_of(make_adapter()), alias="default")
    broken = await send(http, adapter_id, form_of(make_adapter(poison=float("nan"))), alias="default", wait="resident")
    assert code_of(broken) == (400, "not_finite")
    alias = f"/admin/v1/adapters/{adapter_id}/aliases/default"
    assert (await http.get(alias)).json()["targets"] == [{"version": 1, "weight": 100}]
    mended = (await send(http, adapter_id, form_of(make_adapter()), alias="default")).json()
    assert (mended["number"], (await http.get(alias)).json()["targets"]) == (3, [{"version": 3, "weight": 100}])


async def test_untrained_weights_are_pushed_only_on_request(
    http: httpx.AsyncClient, make_adapter: Callable[..., Path], tmp_path: Path
) -> None:
    from safetensors.numpy import load, save

    adapter_id = await new_adapter(http)
    files = form_of(make_adapter())
    zero = {name: array * 0 if "lora_B" in name else array for name, array in load(files[FILES[1]][1]).items()}
    files[FILES[1]] = (FILES[1], save(zero))
    assert code_of(await send(http, adapter_id, files)) == (400, "zero_effect")
    assert (await send(http, adapter_id, files, untrained=True)).json()["state"] == "ready"


async def test_who_may_push_move_and_stop(
    http: httpx.AsyncClient, admin_side: AdminSide, make_adapter: Callable[..., Path]
) -> None:
    adapter_id = await new_adapter(http)
    files = form_of(make_adapter())
    async with tenants_client(admin_side, "tenant:develop") as developer:
        assert code_of(await send(developer, adapter_id, files, alias="default")) == (403, "insufficient_scope")
        stop = await send(developer, adapter_id, files, alias="live", running="stop")
        assert code_of(stop) == (403, "insufficient_scope")
        live = (await send(developer, adapter_id, files, alias="live")).json()
        assert live["alias"]["targets"] == [{"version": 1, "weight": 100}]
    async with tenants_client(admin_side, "tenant:read") as reader:
        assert code_of(await send(reader, adapter_id, files)) == (403, "insufficient_scope")
    async with tenants_client(admin_side, "tenant:admin", tenant="globex") as stranger:
        assert code_of(await send(stranger, adapter_id, files)) == (404, "adapter_not_found")
    assert code_of(await send(http, adapter_id, files, running="stop")) == (400, "invalid_value")
    assert code_of(await send(http, adapter_id, files, alias="Not a slug")) == (400, "invalid_name")
    assert (await send(http, adapter_id, files, wait="never")).status_code == 400


async def test_a_push_during_a_push_ends_with_the_later_version(
    http: httpx.AsyncClient, admin_side: AdminSide, make_adapter: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The earlier push loads its version while the later one moves the alias."""
    adapter_id = await new_adapter(http)
    await send(http, adapter_id, form_of(make_adapter()), alias="default")
    loads, may_end = admin_side.services.engine.loads, asyncio.Event()
    load = loads.load
    is_loading = asyncio.Event()

    async def slow(*arguments: Any) -> Any:
        is_loading.set()
        await may_end.wait()
        return await load(*arguments)

    monkeypatch.setattr(type(loads), "load", lambda self, *arguments: slow(*arguments))
    earlier = asyncio.create_task(send(http, adapter_id, form_of(make_adapter()), alias="default", wait="resident"))
    await is_loading.wait()
    later = (await send(http, adapter_id, form_of(make_adapter()), alias="default")).json()
    may_end.set()
    overtaken = (await earlier).json()
    assert (overtaken["number"], later["number"]) == (2, 3)
    for answer in (overtaken, later):
        assert answer["alias"]["targets"] == [{"version": 3, "weight": 100}]


async def test_a_flood_of_pushes_gets_429_and_delays_nobody_else(
    http: httpx.AsyncClient, admin_side: AdminSide, make_adapter: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    from loramux.admin.server import transfer_slots

    monkeypatch.setattr(transfer_slots, "WAIT_S", 0.5)
    flooded, other = await new_adapter(http), await new_adapter(http, "globex")
    directories = [make_adapter() for _ in range(8)]
    pushes = [asyncio.create_task(send(http, flooded, form_of(directories[i % 8]))) for i in range(100)]
    await asyncio.sleep(0)
    answer = await send(http, other, form_of(make_adapter()))
    assert answer.status_code == 200, answer.text
    answers = await asyncio.gather(*pushes)
    refused = {response.json()["error"]["code"] for response in answers if response.status_code != 200}
    assert refused <= {"too_many_pushes", "adapter_validating"}
    assert all("retry-after" in response.headers for response in answers if response.status_code != 200)
    numbers = {response.json()["number"] for response in answers if response.status_code == 200}
    assert numbers
    assert numbers <= set(range(1, 9))
    slots = admin_side.services.slots
    assert (slots.pushes.num_taken, slots.push_turns.num_taken) == (0, 0)


async def test_a_push_that_has_been_received_waits_for_its_turn(
    http: httpx.AsyncClient, admin_side: AdminSide, make_adapter: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    from loramux.admin.server import transfer_slots

    monkeypatch.setattr(transfer_slots, "WAIT_S", 0.05)
    adapter_id = await new_adapter(http)
    slots, tenant_id = admin_side.services.slots, (await http.get("/admin/v1/tenants/acme")).json()["id"]
    async with slots.push_turns.held_slot(tenant_id):
        push = asyncio.create_task(send(http, adapter_id, form_of(make_adapter())))
        done, _ = await asyncio.wait([push], timeout=0.3)
        assert not done, push.result().text
    assert (await push).status_code == 200


@pytest.mark.parametrize(
    "error",
    [
        BlobStoreUnavailable("no store"),
        ValidationFailed("the disk of the validation is full"),
        WeightsBeingPurged("equal weights are being purged"),
    ],
    ids=lambda error: type(error).__name__,
)
async def test_a_store_that_fails_leaves_a_push_that_can_be_repeated(
    http: httpx.AsyncClient,
    admin_side: AdminSide,
    make_adapter: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
    error: Exception,
) -> None:
    adapter_id = await new_adapter(http)
    files = form_of(make_adapter())
    with monkeypatch.context() as patch:

        def fail(*arguments: Any, **named: Any) -> bool:
            raise error

        patch.setattr(type(admin_side.blobs), "put", fail)
        failed = await send(http, adapter_id, files)
        assert code_of(failed) == (503, "store_unavailable")
    with anyio.fail_after(30):
        while (again := await send(http, adapter_id, files)).status_code == 503:
            assert code_of(again) == (503, "adapter_validating")
            admin_side.services.adapters.ingest.has_pending.set()
            await anyio.sleep(0.05)
    assert (again.status_code, again.json()["state"], again.json()["number"]) == (200, "ready", 2)


async def test_a_trainer_that_dies_in_the_middle_leaves_nothing(
    admin_server: RunningServer, admin_side: AdminSide, make_adapter: Callable[..., Path], tmp_path: Path
) -> None:
    headers = {"authorization": f"Bearer {ADMIN_KEY}"}
    async with httpx.AsyncClient(base_url=admin_server.url, headers=headers, trust_env=False) as http:
        adapter_id = await new_adapter(http)
        uploads, body = f"/admin/v1/adapters/{adapter_id}/uploads", form(CONFIG, TENSORS)
        address = urlsplit(admin_server.url)
        _, writer = await asyncio.open_connection(address.hostname, address.port)
        head = f"PUT /admin/v1/adapters/{adapter_id}/push HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n"
        head += f"authorization: Bearer {ADMIN_KEY}\r\ncontent-type: {FORM['content-type']}\r\n\r\n"
        writer.write(head.encode() + body[: len(body) // 2])
        await writer.drain()
        with anyio.fail_after(30):
            while not (await http.get(uploads)).json()["data"]:  # noqa: ASYNC110 - the server is a thread
                await anyio.sleep(0.02)
            # The bytes of a push in progress count against the quota, and nothing else can be done with its upload.
            (upload,) = (await http.get(uploads)).json()["data"]
            put = await http.put(f"{uploads}/{upload['id']}/files/{FILES[1]}", content=b"x")
            assert put.status_code == 400
            writer.close()
            scratch = tmp_path / "scratch"
            while (await http.get(uploads)).json()["data"] or list(scratch.glob("*")):  # noqa: ASYNC110
                await anyio.sleep(0.02)
        versions = f"/admin/v1/adapters/{adapter_id}/versions"
        assert (await http.get(versions)).json()["data"] == []
        assert (await send(http, adapter_id, form_of(make_adapter()))).json()["number"] == 1
    assert admin_side.services.slots.pushes.num_taken == 0


async def test_a_push_stops_only_requests_on_the_replaced_versions(
    http: httpx.AsyncClient, admin_side: AdminSide, make_adapter: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    services = admin_side.services
    adapter_id, other_id = await new_adapter(http), await new_adapter(http, name="other")
    tenant = services.accounts.tenants.get("acme")
    assert tenant is not None
    key = services.accounts.api_keys.create(tenant.id, "caller").key.id
    kept = (await send(http, adapter_id, form_of(make_adapter()), alias="kept")).json()["id"]
    replaced = (await send(http, adapter_id, form_of(make_adapter()), alias="live")).json()["id"]
    other = (await send(http, other_id, form_of(make_adapter()), alias="live")).json()["id"]

    grantee = services.accounts.tenants.create("globex")
    theirs = services.accounts.api_keys.create(grantee.id, "caller").key.id

    def begin(version_id: str | None, tenant_id: str = tenant.id, key: str = key) -> str:
        request_id = new_id("req")
        Admission(services.database).reserve(
            ReservationRequest(
                request_id=request_id,
                tenant_id=tenant_id,
                api_key_id=key,
                model="acme/support",
                adapter_version_id=version_id,
                endpoint="completions",
                prompt_tokens=1,
                reserved_tokens=2,
            )
        )
        return request_id

    running = {version: begin(version) for version in (kept, replaced, other, None)}
    second, foreign = begin(replaced), begin(replaced, grantee.id, theirs)
    cancelled: list[str] = []
    monkeypatch.setattr(type(services.engine.live), "cancel", lambda self, request_id: cancelled.append(request_id))

    async def states() -> dict[str, str]:
        listed = (await http.get("/admin/v1/requests", params={"tenant": "acme"})).json()["data"]
        return {request["id"]: request["state"] for request in listed}

    finish = (await send(http, adapter_id, form_of(make_adapter()), alias="kept")).json()
    assert (finish["stopped"], set((await states()).values())) == (0, {"running"})
    files = form_of(make_adapter())
    async with tenants_client(admin_side, "tenant:admin") as administrator:
        with monkeypatch.context() as patch:

            def fail(*arguments: Any) -> list[str]:
                raise OSError("no database")

            # The alias has moved, but no request has been stopped.
            patch.setattr(type(services.engine.requests), "cancel_versions", fail)
            broken = await send(administrator, adapter_id, files, alias="live", running="stop")
            assert broken.status_code >= 500
        moved = (await http.get(f"/admin/v1/adapters/{adapter_id}/aliases/live")).json()
        assert set((await states()).values()) == {"running"}
        stop = (await send(administrator, adapter_id, files, alias="live", running="stop")).json()
        again = (await send(administrator, adapter_id, files, alias="live", running="stop")).json()
    assert stop["alias"] == again["alias"] == moved
    assert (stop["stopped"], again["stopped"]) == (2, 0)
    # A tenant with a grant keeps its request.
    found = await http.get(f"/admin/v1/requests/{foreign}")
    assert found.json()["state"] == "running"
    assert sorted(cancelled) == sorted([running[replaced], second])
    expected = dict.fromkeys(running.values(), "running") | dict.fromkeys([running[replaced], second], "cancelling")
    assert await states() == expected


async def test_the_engine_loads_a_version_before_the_store_has_its_bytes(
    http: httpx.AsyncClient, admin_side: AdminSide, make_adapter: Callable[..., Path], tmp_path: Path
) -> None:
    ingest, target = admin_side.services.adapters.ingest, TARGET
    tier = DiskTier(tmp_path / "tier", 1 << 30, target.pack_key)
    ingest.pushes._open_tier = lambda: tier
    adapter_id = await new_adapter(http)
    put, seen = type(admin_side.blobs).put, dict[str, bool]()
    loads, load = list[str](), type(admin_side.services.engine.loads).load

    def slow(self: Any, key: str, source: Any) -> bool:
        # Before the store has the canonical file, the engine loads the version from the disk.
        if key.startswith("adapters/"):
            wait_until(lambda: bool(admin_side.engine.resident))
        seen[key.partition("/")[0]] = bool(admin_side.engine.resident)
        return bool(put(self, key, source))

    def noted(self: Any, digest: str, *arguments: Any) -> Any:
        loads.append(digest)
        return load(self, digest, *arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(admin_side.blobs), "put", slow)
        patch.setattr(type(admin_side.services.engine.loads), "load", noted)
        pushed = await send(http, adapter_id, form_of(make_adapter()), wait="resident")
    assert pushed.status_code == 200, pushed.text
    assert loads == [pushed.json()["digest"]], "the engine was asked once"
    assert list(admin_side.engine.resident) == [pushed.json()["digest"]]
    assert seen["adapters"]
    held = tier.hold(pushed.json()["digest"])
    assert held is not None
    with held:
        packed = admin_side.blobs.read_bytes(packed_key(pushed.json()["digest"], target.pack_key))
        assert os.pread(held.descriptor, len(packed) + 1, 0) == packed

    # Without a tier that can be opened, the push is as it was.
    def broken() -> DiskTier:
        raise PermissionError("no tier")

    ingest.pushes._tier, ingest.pushes._open_tier = None, broken
    again = await send(http, adapter_id, form_of(make_adapter()), wait="resident")
    assert again.status_code == 200, again.text
    stages = [stage.partition(";")[0] for stage in again.headers["server-timing"].split(", ")]
    assert stages == ["receive", "wait", "validate", "store", "ready", "load"]
    # A short time would tell a tenant that another one has stored the same bytes.
    async with tenants_client(admin_side, "tenant:develop") as developer:
        third = await send(developer, adapter_id, form_of(make_adapter()))
    stages = [stage.partition(";")[0] for stage in third.headers["server-timing"].split(", ")]
    assert stages == ["receive", "wait", "validate", "ready"]


async def test_servers_with_the_alias_load_its_new_version_before_it_moves(
    http: httpx.AsyncClient, admin_side: AdminSide, make_adapter: Callable[..., Path]
) -> None:
    adapter_id = await new_adapter(http)
    first = (await send(http, adapter_id, form_of(make_adapter()), alias="default")).json()
    alias, calls = f"/admin/v1/adapters/{adapter_id}/aliases/default", list[tuple[str, list[str], int]]()

    async def load_elsewhere(digest: str, predecessors: Collection[str], timeout_s: float) -> None:
        target = (await http.get(alias)).json()["targets"][0]["version"]
        calls.append((digest, list(predecessors), target))

    # The record is frozen, and a test cannot replace the services of a running app.
    object.__setattr__(admin_side.services.engine, "load_elsewhere", load_elsewhere)
    second = (await send(http, adapter_id, form_of(make_adapter()), alias="default", wait="resident")).json()
    assert second["alias"]["targets"] == [{"version": 2, "weight": 100}]
    assert calls == [(second["digest"], [first["digest"]], 1)]


async def test_an_engine_that_cannot_load_leaves_the_alias(
    http: httpx.AsyncClient, admin_side: AdminSide, make_adapter: Callable[..., Path]
) -> None:
    adapter_id = await new_adapter(http)
    await send(http, adapter_id, form_of(make_adapter()), alias="default")
    admin_side.engine.die()
    files = form_of(make_adapter())
    failed = await send(http, adapter_id, files, alias="default", wait="resident")
    assert code_of(failed) == (503, "engine_unavailable")
    alias = f"/admin/v1/adapters/{adapter_id}/aliases/default"
    assert (await http.get(alias)).json()["targets"] == [{"version": 1, "weight": 100}]
    admin_side.engine.revive()
    again = (await send(http, adapter_id, files, alias="default", wait="resident")).json()
    assert again["alias"]["targets"] == [{"version": 2, "weight": 100}]
