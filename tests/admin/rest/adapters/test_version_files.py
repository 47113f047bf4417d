from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import httpx
import pytest

from loramux.adapter_store.ingest.export import ExportedFile
from loramux.adapter_store.ingest.originals import config_key
from loramux.adapter_store.registry.records import UploadFile
from loramux.admin.rest.adapters import version_files
from loramux.admin.rest.services import MAX_DOWNLOADS, MAX_DOWNLOADS_EACH
from loramux.admin.server import transfer_slots
from tests.admin.rest.adapters.pushed_versions import FILES, new_adapter, push
from tests.admin.rest.tenants_and_keys import new_bearer

pytestmark = pytest.mark.anyio


async def test_uploaded_files_can_be_downloaded(http: httpx.AsyncClient, make_adapter: Callable[..., Path]) -> None:
    adapter_id = await new_adapter(http)
    directory = make_adapter()
    await push(http, adapter_id, directory)
    reader = await new_bearer(http, "acme")
    for name in FILES:
        url = f"/admin/v1/adapters/{adapter_id}/versions/1/files/{name}"
        answer = await http.get(url, headers=reader)
        data = (directory / name).read_bytes()
        assert (answer.status_code, answer.content) == (200, data)
        assert answer.headers["content-length"] == str(len(data))
        assert answer.headers["etag"] == f'"{hashlib.sha256(data).hexdigest()}"'
        assert answer.headers["content-disposition"] == f'attachment; filename="{name}"'
        assert answer.headers["content-type"] == "application/octet-stream"
    archived = await http.post(f"/admin/v1/adapters/{adapter_id}/versions/1/archive")
    assert (archived.status_code, archived.json()["error"]["code"]) == (409, "version_in_use")


async def test_unavailable_file_gets_a_specific_error(
    http: httpx.AsyncClient, admin_side: Any, make_adapter: Callable[..., Path]
) -> None:
    adapter_id = await new_adapter(http)
    version = await push(http, adapter_id, make_adapter())
    rejected = await push(http, adapter_id, make_adapter(config={"bias": "some"}))
    base = f"/admin/v1/adapters/{adapter_id}/versions"
    await new_adapter(http, "globex", "other")
    stranger = await new_bearer(http, "globex")
    admin_side.blobs.delete(config_key(version["id"]))
    for url, headers, expected in (
        (f"{base}/1/files/README.md", {}, (404, "file_not_found")),
        (f"{base}/1/files/..%2F..%2Fetc%2Fpasswd", {}, (404, "not_found")),
        (f"{base}/1/files/{FILES[0]}", {}, (404, "original_not_kept")),
        (f"{base}/{rejected['number']}/files/{FILES[0]}", {}, (409, "version_not_ready")),
        (f"{base}/9/files/{FILES[0]}", {}, (404, "version_not_found")),
        (f"{base}/9/report", {}, (404, "version_not_found")),
        (f"{base}/1/files/{FILES[1]}", stranger, (404, "adapter_not_found")),
        (f"{base}/1/report", stranger, (404, "adapter_not_found")),
        (f"{base}/1/files/{FILES[1]}", {"authorization": "Bearer nonsense"}, (401, "invalid_api_key")),
        (f"{base}/1/files/{FILES[1]}", await new_bearer(http, "acme", ["adapters"]), (403, "insufficient_scope")),
    ):
        answer = await http.get(url, headers=headers)
        assert (answer.status_code, answer.json()["error"]["code"]) == expected, url


async def test_version_report_is_kept(http: httpx.AsyncClient, make_adapter: Callable[..., Path]) -> None:
    adapter_id = await new_adapter(http)
    directory = make_adapter(rank=3)
    version = await push(http, adapter_id, directory)
    report = (await http.get(f"/admin/v1/adapters/{adapter_id}/versions/1/report")).json()
    assert (report["version_id"], report["state"], report["digest"]) == (version["id"], "ready", version["digest"])
    assert report["error"] is None
    assert report["report"] == version["report"]
    assert report["report"]["max_rank"] == 3
    assert [(file["name"], file["size"]) for file in report["files"]] == [
        (name, (directory / name).stat().st_size) for name in FILES
    ]
    await push(http, adapter_id, make_adapter(config={"bias": "some"}))
    refused = (await http.get(f"/admin/v1/adapters/{adapter_id}/versions/2/report")).json()
    assert (refused["state"], refused["error"]["code"]) == ("rejected", "unsupported_config")


async def test_version_document_shows_the_optional_files(
    http: httpx.AsyncClient, make_adapter: Callable[..., Path]
) -> None:
    adapter_id = await new_adapter(http)
    directory = make_adapter()
    plain = await push(http, adapter_id, directory)
    assert plain["version_digest"] == plain["digest"] is not None
    assert (plain["chat_template"], plain["generation_config"]) == (None, None)
    template, settings = b"{{ messages[0].content }}", b'{"top_k": 5, "do_sample": true}'
    (directory / "chat_template.jinja").write_bytes(template)
    (directory / "generation_config.json").write_bytes(settings)
    version = await push(http, adapter_id, directory)
    assert (version["number"], version["digest"]) == (2, plain["digest"])
    assert version["version_digest"] != version["digest"]
    assert version["chat_template"] == hashlib.sha256(template).hexdigest()
    assert json.dumps(version["generation_config"]) == '{"top_k": 5}', "a whole number stays one"
    url = f"/admin/v1/adapters/{adapter_id}/versions/2"
    assert (await http.get(f"{url}/report")).json()["version_digest"] == version["version_digest"]
    assert (await http.get(f"{url}/files/chat_template.jinja")).content == template
    assert (await http.get(f"{url}/files/generation_config.json")).content == settings
    absent = await http.get(f"/admin/v1/adapters/{adapter_id}/versions/1/files/chat_template.jinja")
    assert (absent.status_code, absent.json()["error"]["code"]) == (404, "file_not_found")


async def test_version_document_shows_the_invocation_tokens(
    http: httpx.AsyncClient, make_adapter: Callable[..., Path]
) -> None:
    adapter_id = await new_adapter(http)
    directory = make_adapter(config={"task_type": "CAUSAL_LM"})
    plain = await push(http, adapter_id, directory)
    assert plain["invocation_tokens"] is None
    config = json.loads((directory / "adapter_config.json").read_text())
    for tokens, number in (([5, 6], 2), ([6, 5], 3)):
        (directory / "adapter_config.json").write_text(json.dumps({**config, "alora_invocation_tokens": tokens}))
        version = await push(http, adapter_id, directory)
        assert (version["state"], version["number"], version["invocation_tokens"]) == ("ready", number, tokens)
        assert version["digest"] != plain["digest"]
    (directory / "adapter_config.json").write_text(json.dumps({**config, "alora_invocation_tokens": [2**31]}))
    refused = await push(http, adapter_id, directory)
    assert (refused["state"], refused["invocation_tokens"], refused["digest"]) == ("rejected", None, None)
    assert (refused["error"]["code"], refused["error"]["param"]) == ("invalid_config", "alora_invocation_tokens")


async def test_version_document_shows_the_parsers(http: httpx.AsyncClient, make_adapter: Callable[..., Path]) -> None:
    adapter_id = await new_adapter(http)
    directory = make_adapter()
    plain = await push(http, adapter_id, directory)
    assert (plain["tool_call_parser"], plain["reasoning_parser"]) == (None, None)
    (directory / "parsers.json").write_text('{"tool_call_parser": "hermes"}')
    version = await push(http, adapter_id, directory)
    assert (version["tool_call_parser"], version["reasoning_parser"]) == ("hermes", None)
    assert (version["digest"], version["version_digest"] != plain["version_digest"]) == (plain["digest"], True)
    (directory / "parsers.json").write_text('{"tool_call_parser": "Hermes"}')
    refused = await push(http, adapter_id, directory)
    assert (refused["state"], refused["tool_call_parser"]) == ("rejected", None)
    assert (refused["error"]["code"], refused["error"]["param"]) == ("invalid_parsers", "tool_call_parser")
    assert "must be one of auto, off, functiongemma, gemma4, glm45, harmony, hermes" in refused["error"]["message"]


async def test_unusable_template_is_refused_with_its_name(
    http: httpx.AsyncClient, make_adapter: Callable[..., Path]
) -> None:
    directory = make_adapter()
    (directory / "chat_template.jinja").write_text("{% if %}")
    version = await push(http, await new_adapter(http), directory)
    assert (version["state"], version["version_digest"]) == ("rejected", None)
    assert (version["error"]["code"], version["error"]["param"]) == ("invalid_template", "chat_template.jinja")


async def test_stalled_download_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(version_files, "DOWNLOAD_TIMEOUT_S", 0.05)
    releases: list[bool] = []
    file = ExportedFile(UploadFile(FILES[0], 2, "0" * 64), b"{}", None, None)
    response = version_files.ExportResponse(file, lambda: releases.append(True))
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)
        if message["type"] == "http.response.body":
            await anyio.sleep_forever()

    with anyio.fail_after(5):
        await response({"type": "http", "extensions": {}}, anyio.sleep_forever, send)
    assert [message["type"] for message in sent] == ["http.response.start", "http.response.body"]
    assert releases == [True]


async def test_download_without_a_free_slot_gets_retry_after(
    http: httpx.AsyncClient, admin_side: Any, make_adapter: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transfer_slots, "WAIT_S", 0.05)
    adapter_id = await new_adapter(http)
    await push(http, adapter_id, make_adapter())
    url = f"/admin/v1/adapters/{adapter_id}/versions/1/files/{FILES[0]}"
    download_slots = admin_side.services.slots.downloads
    tenants = ["umbrella"] * MAX_DOWNLOADS_EACH + ["initech"] * (MAX_DOWNLOADS - MAX_DOWNLOADS_EACH)
    releases = [await download_slots.acquire_slot(tenant) for tenant in tenants]
    answer = await http.get(url)
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "too_many_downloads")
    assert int(answer.headers["retry-after"]) > 0
    releases[0]()
    assert (await http.get(url)).status_code == 200
    assert (await http.get(url.replace(FILES[0], "nothing"))).status_code == 404
    assert download_slots.num_taken == MAX_DOWNLOADS - 1, "a refusal releases its slot"
