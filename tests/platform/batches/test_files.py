"""`/v1/files`, with OpenAI's client."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai import NotFoundError
from sqlalchemy import update

from loramux.adapter_store.errors import BlobStoreUnavailable
from loramux.migrations.schema import files as file_rows
from loramux.platform.accounts.tenants import Tenants
from loramux.platform.batches import form_upload
from loramux.platform.batches.form_upload import UploadForm
from loramux.platform.batches.services import MAX_TRANSFERS
from loramux.platform.batches.tenant_files import UPLOAD_US, Owner, TenantFile, TenantFiles
from tests.platform.batches.batch_lab import CHAT, BatchLab, content_of, line
from tests.platform.clocked_databases import FakeClock
from tests.platform.gateways import Gateway

pytestmark = pytest.mark.anyio

FORM = {"purpose": (None, "batch")}


async def post(gateway: Gateway, **parts: Any) -> httpx.Response:
    return await gateway.http.post("/v1/files", files={**FORM, "file": ("in.jsonl", b"{}\n"), **parts})


def error_of(answer: httpx.Response) -> tuple[int, str, str | None]:
    error = answer.json()["error"]
    return answer.status_code, error["code"], error["param"]


async def test_file_is_kept_and_deleted(gateway: Gateway) -> None:
    content = b'{"custom_id": "\xc3\xa9"}\n' * 1000
    file = await gateway.openai.files.create(file=("dir/in.jsonl", content), purpose="batch")
    assert (file.object, file.bytes, file.filename, file.purpose) == ("file", len(content), "in.jsonl", "batch")
    assert await gateway.openai.files.retrieve(file.id) == file
    assert (await gateway.openai.files.content(file.id)).content == content
    deleted = await gateway.openai.files.delete(file.id)
    assert (deleted.id, deleted.deleted) == (file.id, True)
    for call in (gateway.openai.files.retrieve, gateway.openai.files.content, gateway.openai.files.delete):
        with pytest.raises(NotFoundError, match="there is no such file"):
            await call(file.id)
    assert list(gateway.kept.files._blobs.list_keys()) == []


async def test_lists_are_paged_in_both_orders(gateway: Gateway) -> None:
    ids = [(await gateway.openai.files.create(file=b"{}", purpose="batch")).id for _ in range(3)]
    newest = [file.id async for file in gateway.openai.files.list(limit=2)]
    assert newest == sorted(ids, reverse=True)
    assert [file.id async for file in gateway.openai.files.list(limit=1, order="asc")] == sorted(ids)
    assert [file.id async for file in gateway.openai.files.list(purpose="batch_output")] == []


async def test_files_of_others_are_like_unknown_ones(gateway: Gateway) -> None:
    file = (await post(gateway)).json()
    limited = gateway.services.callers.api_keys.create(
        gateway.tenant.id, "limited", adapters=[gateway.add_adapter("acme", "support")]
    )
    for key in (gateway.key_of("other"), limited.secret):
        headers = {"authorization": f"Bearer {key}"}
        for method, path in (("GET", ""), ("GET", "/content"), ("DELETE", "")):
            answers = [
                await gateway.http.request(method, f"/v1/files/{one}{path}", headers=headers)
                for one in (file["id"], "fil_" + "0" * 32, "../x", "file-abc")
            ]
            known = {error_of(one) for one in answers if one.json()["error"]["code"] != "not_found"}
            assert known == {(404, "file_not_found", "file_id")}
        assert (await gateway.http.get("/v1/files", headers=headers)).json()["data"] == []
    assert (await gateway.http.get(f"/v1/files/{file['id']}")).status_code == 200


async def test_keys_without_inference_have_no_files(gateway: Gateway) -> None:
    headers = {"authorization": f"Bearer {gateway.key_of('acme', 'tenant:read')}"}
    assert error_of(await gateway.http.get("/v1/files", headers=headers)) == (403, "insufficient_scope", None)


@pytest.mark.parametrize(
    ("parts", "expected"),
    [
        ({"purpose": (None, "fine-tune")}, (400, "invalid_value", "purpose")),
        ({"purpose": ("x.txt", b"batch")}, (400, "invalid_value", "purpose")),
        ({"file": (None, "text")}, (400, "invalid_value", "file")),
        ({"file": ("in.jsonl", b"")}, (400, "empty_file", "file")),
        ({"more": (None, "x")}, (400, "unknown_parameter", "more")),
        ({"purpose": (None, "x" * 2000)}, (400, "invalid_value", "purpose")),
        ({"expires_after[anchor]": (None, "created_at")}, (400, "invalid_value", "expires_after[seconds]")),
        ({"file": ("in.jsonl", b"x" * ((1 << 20) + 1))}, (413, "file_too_large", "file")),
    ],
    ids=["purpose", "purpose as a file", "file as text", "empty", "unknown", "long", "half a lifetime", "large"],
)
async def test_bad_forms_are_refused(gateway: Gateway, parts: Any, expected: Any) -> None:
    assert error_of(await post(gateway, **parts)) == expected
    assert (await gateway.http.get("/v1/files")).json()["data"] == []


async def test_missing_parts_are_named(gateway: Gateway) -> None:
    for files, param in (({"file": ("a", b"x")}, "purpose"), (FORM, "file")):
        answer = await gateway.http.post("/v1/files", files=files)
        assert error_of(answer) == (400, "missing_required_parameter", param)


async def test_declared_size_is_refused_before_the_file_arrives(gateway: Gateway) -> None:
    """The body would never end."""

    async def endless() -> Any:
        raise AssertionError("the body was read")
        yield b""

    headers = {"content-length": str(10 << 30), "content-type": "multipart/form-data; boundary=x"}
    answer = await gateway.http.post("/v1/files", content=endless(), headers=headers)
    assert error_of(answer) == (413, "file_too_large", "file")


async def test_transfers_of_a_tenant_are_limited(gateway: Gateway) -> None:
    transfers = gateway.kept.transfers
    file = (await post(gateway)).json()
    with ExitStack() as held:
        for _ in range(MAX_TRANSFERS):
            held.enter_context(transfers.held(gateway.tenant.id))
        for answer in (await post(gateway), await gateway.http.get(f"/v1/files/{file['id']}/content")):
            assert error_of(answer) == (429, "too_many_transfers", None)
            assert answer.headers["retry-after"] == "5"
        headers = {"authorization": f"Bearer {gateway.key_of('other')}"}
        files = {**FORM, "file": ("a", b"{}")}
        assert (await gateway.http.post("/v1/files", files=files, headers=headers)).status_code == 200
    assert (await post(gateway)).status_code == 200


async def test_form_that_ends_early_is_refused(gateway: Gateway) -> None:
    headers = {"content-type": "multipart/form-data; boundary=x"}
    answer = await gateway.http.post("/v1/files", content=b"--x\r\n", headers=headers)
    assert error_of(answer) == (400, "invalid_form", None)


async def test_a_full_disk_can_be_tried_again(gateway: Gateway, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(form_upload, "UploadForm", lambda _: UploadForm(Path("/dev/full")))
    answer = await post(gateway)
    assert (error_of(answer), answer.headers["retry-after"]) == ((503, "disk_full", None), "30")
    lines = gateway.services.metrics.render().decode().splitlines()
    assert 'loramux_requests_total{endpoint="files",status="503"} 1.0' in lines
    assert 'loramux_errors_total{code="disk_full",endpoint="files",status="503"} 1.0' in lines


async def test_other_errors_of_files_are_internal_errors(gateway: Gateway, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(form_upload, "UploadForm", lambda _: UploadForm(Path("/nowhere/file")))
    assert error_of(await post(gateway)) == (500, "internal_error", None)
    assert (
        'loramux_errors_total{code="internal_error",endpoint="files",status="500"} 1.0'
        in gateway.services.metrics.render().decode().splitlines()
    )


async def test_storage_of_a_tenant_is_limited(gateway: Gateway, tmp_path: Path) -> None:
    files, source = gateway.kept.files, tmp_path / "file"
    few = TenantFiles(gateway.database, files._blobs, tmp_path, 100, max_total_bytes=100)
    source.write_bytes(b"x" * 60)
    owner = Owner(gateway.tenant.id, "key", is_limited=False)
    few.create(owner, "a", source)
    with pytest.raises(Exception, match="must not exceed 100 bytes"):
        few.create(owner, "b", source)
    assert len(list(files._blobs.list_keys())) == 1


async def test_what_is_over_is_cleared_up(gateway: Gateway, tmp_path: Path) -> None:
    files, source = gateway.kept.files, tmp_path / "file"
    source.write_bytes(b"x")
    owner = Owner(gateway.tenant.id, "key", is_limited=False)
    kept, over = files.create(owner, "kept", source), files.create(owner, "over", source, 0)
    stale = files.create(owner, "stale", source)
    with gateway.database.write() as connection:
        connection.exec_driver_sql(
            f"UPDATE files SET state = 'uploading', created_us = created_us - {UPLOAD_US + 1} WHERE id = '{stale.id}'"
        )
    files.clear_up()
    assert list(files._blobs.list_keys()) == [kept.blob_key]
    assert over.id not in {one["id"] for one in (await gateway.http.get("/v1/files")).json()["data"]}


async def test_expired_file_is_gone_before_it_is_swept(
    gateway_on_each: Gateway, clock: FakeClock, tmp_path: Path
) -> None:
    gateway, files = gateway_on_each, gateway_on_each.kept.files
    source = tmp_path / "file"
    source.write_bytes(content_of([line("a")]))
    owner = Owner(gateway.tenant.id, "key", is_limited=False)
    unused, needed = (files.create(owner, name, source, 3_600_000_000) for name in ("unused", "needed"))
    new = {"endpoint": CHAT, "completion_window": "24h"}
    await gateway.openai.batches.create(input_file_id=needed.id, **new)
    clock.advance(3600)
    assert [one.id async for one in gateway.openai.files.list()] == [needed.id]
    with pytest.raises(NotFoundError):
        await gateway.openai.files.retrieve(unused.id)
    with pytest.raises(NotFoundError):
        await gateway.openai.batches.create(input_file_id=unused.id, **new)
    async with BatchLab(gateway).running():
        [batch] = [one async for one in gateway.openai.batches.list()]
        assert (await BatchLab(gateway).finished(batch)).status == "completed"
    assert [one.id async for one in gateway.openai.files.list(purpose="batch")] == []


async def test_file_that_is_kept_by_now_is_not_swept(
    gateway_on_each: Gateway, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sweep has read its list before."""
    files, source = gateway_on_each.kept.files, tmp_path / "file"
    source.write_bytes(b"x")
    owner = Owner(gateway_on_each.tenant.id, "key", is_limited=False)
    for name in ("first", "second"):
        files.create(owner, name, source, 0)
    delete = TenantFiles._delete

    def delete_late(self: TenantFiles, file: TenantFile) -> None:
        with gateway_on_each.database.write() as connection:
            connection.execute(update(file_rows).where(file_rows.c.id != file.id).values(expires_us=None))
        delete(self, file)

    monkeypatch.setattr(TenantFiles, "_delete", delete_late)
    files.clear_up()
    assert len(list(files._blobs.list_keys())) == 1
    assert len((await gateway_on_each.http.get("/v1/files")).json()["data"]) == 1


async def test_unreachable_store_is_reported(gateway: Gateway, monkeypatch: pytest.MonkeyPatch) -> None:
    file = (await post(gateway)).json()

    def fail(*_: Any, **__: Any) -> None:
        raise BlobStoreUnavailable("it is down", retry_after_s=7)

    for name in ("put", "get"):
        monkeypatch.setattr(gateway.kept.files._blobs, name, fail)
    for answer in (await post(gateway), await gateway.http.get(f"/v1/files/{file['id']}/content")):
        assert error_of(answer) == (503, "blob_store_unavailable", None)
        assert answer.headers["retry-after"] == "7"


async def test_deleted_tenant_leaves_no_files(gateway: Gateway) -> None:
    await gateway.http.post("/v1/files", files={**FORM, "file": ("a", b"{}")})
    with gateway.database.write() as connection:
        connection.exec_driver_sql("UPDATE api_keys SET revoked_us = 1")
    assert Tenants(gateway.database).delete(gateway.tenant.id)
    assert list(gateway.kept.files._blobs.list_keys())
    gateway.kept.files.clear_up()
    assert list(gateway.kept.files._blobs.list_keys()) == []


async def test_purged_tenant_leaves_no_files(gateway: Gateway) -> None:
    await gateway.http.post("/v1/files", files={**FORM, "file": ("a", b"{}")})
    tenants = Tenants(gateway.database)
    with gateway.database.write() as connection:
        connection.exec_driver_sql("UPDATE tenants SET state = 'suspended'")
    files = gateway.kept.files
    of_another_database = "files/ten_other/fil_other"
    files._blobs.put(of_another_database, b"x")
    tenants.purge(gateway.tenant.id)
    for _ in range(2):
        files.clear_up()
        assert list(files._blobs.list_keys()) == [of_another_database]
        # A server may still be writing one.
        files._blobs.put(f"files/{gateway.tenant.id}/fil_late", b"x")
    with gateway.database.write() as connection:
        connection.exec_driver_sql(f"UPDATE file_purges SET purged_us = purged_us - {UPLOAD_US + 1}")
    files.clear_up()
    assert list(files._blobs.list_keys()) == [of_another_database]
    with gateway.database.read() as connection:
        assert connection.exec_driver_sql("SELECT * FROM file_purges").all() == []
