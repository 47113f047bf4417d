from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import httpx
import pytest
from sqlalchemy import select, update

from loramux.adapter_store.blobs.interface import BlobInfo, BlobStore
from loramux.adapter_store.blobs.local import LocalBlobStore
from loramux.adapter_store.errors import BlobStoreUnavailable, ClaimLost, UploadRefused
from loramux.adapter_store.ingest.claims import ClaimedVersion, VersionClaims
from loramux.adapter_store.sources.adapter_sources import AdapterSources
from loramux.admin.client.client import AdminClient
from loramux.admin.client.push import PushRefused, register_source
from loramux.migrations.schema import adapter_versions, uploads
from loramux.platform.quotas.policies import QuotaPolicies
from tests.admin.admin_side import ADMIN_KEY
from tests.admin.rest.adapters.pushed_versions import new_adapter
from tests.admin.rest.tenants_and_keys import new_bearer

pytestmark = pytest.mark.anyio


class DownBlobStore(LocalBlobStore):
    def head(self, key: str) -> BlobInfo | None:
        raise BlobStoreUnavailable("the bucket operator at 10.0.0.7 cannot be reached")

    def get(self, key: str, destination: Path, max_bytes: int | None = None, deadline_s: float | None = None) -> None:
        raise BlobStoreUnavailable("the bucket operator at 10.0.0.7 cannot be reached")


@pytest.fixture
def bucket(tmp_path: Path) -> Path:
    """The directory that represents `s3://operator`."""
    return tmp_path / "bucket"


@pytest.fixture
def admin_sources(bucket: Path) -> AdapterSources:
    def open_store(url: str) -> BlobStore:
        path = bucket / url.removeprefix("s3://operator/")
        return DownBlobStore(path) if path.name == "down" else LocalBlobStore(path)

    return AdapterSources(["s3://operator/adapters/"], open_store)


async def register(
    http: httpx.AsyncClient, adapter_id: str, source: str, meanwhile: Callable[[], None] = lambda: None
) -> dict[str, Any]:
    response = await http.post(f"/admin/v1/adapters/{adapter_id}/versions", json={"source": source})
    assert response.status_code == 202, response.text
    version = response.json()
    with anyio.fail_after(30):
        while version["state"] in ("pending", "validating"):
            await anyio.sleep(0.05)
            meanwhile()
            url = f"/admin/v1/adapters/{adapter_id}/versions/{version['number']}"
            version = (await http.get(url)).json()
    return dict(version)


def place(bucket: Path, directory: Path, name: str) -> str:
    shutil.copytree(directory, bucket / "adapters" / name)
    return f"s3://operator/adapters/{name}"


async def test_version_is_registered_from_a_bucket(
    http: httpx.AsyncClient, bucket: Path, make_adapter: Callable[..., Path], admin_side: Any
) -> None:
    adapter_id = await new_adapter(http)
    directory = make_adapter()
    source = place(bucket, directory, "one")
    version = await register(http, adapter_id, source + "/")
    assert (version["state"], version["number"]) == ("ready", 1)
    for path in directory.iterdir():
        answer = await http.get(f"/admin/v1/adapters/{adapter_id}/versions/1/files/{path.name}")
        assert answer.content == path.read_bytes()
    assert not list(admin_side.blobs.list_keys("uploads/"))
    again = await register(http, adapter_id, source)
    assert (again["state"], again["error"]["code"]) == ("rejected", "identical_version")
    assert again["number"] == 2


def test_register_source_makes_the_server_copy_the_files(
    admin_url: str, bucket: Path, make_adapter: Callable[..., Path]
) -> None:
    source = place(bucket, make_adapter(), "one")
    with AdminClient(admin_url, ADMIN_KEY) as client:
        client.post("tenants", {"slug": "acme"})
        pushed = register_source(client, source, "acme", "support")
        assert (pushed.model, pushed.version) == ("acme/support", 1)
        with pytest.raises(PushRefused) as refused:
            register_source(client, source + "/nothing", "acme", "support")
        assert refused.value.code == "source_not_found"


async def test_facts_of_a_sources_tokenizer_become_files(
    http: httpx.AsyncClient, bucket: Path, make_adapter: Callable[..., Path]
) -> None:
    adapter_id = await new_adapter(http)
    template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    flags = {"lstrip": False, "rstrip": False, "single_word": False, "normalized": False, "special": True}
    decoder = {"4": {"content": "<|tool|>", **flags}, "60": {"content": "<a>", **flags}}
    directory = make_adapter()
    config = {"chat_template": template, "eos_token": "<a>", "added_tokens_decoder": decoder}
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    version = await register(http, adapter_id, place(bucket, directory, "own"))
    assert version["state"] == "ready", version
    assert version["chat_template"] == hashlib.sha256(template.encode()).hexdigest()
    own = version["report"]["added_vocabulary"]
    assert (own["tokens"], own["renamed"]) == ({"<a>": 60}, {"<|tool|>": 4})
    assert own["special_tokens"] == {"eos_token": "<a>"}
    url = f"/admin/v1/adapters/{adapter_id}/versions/1/files/chat_template.jinja"
    assert (await http.get(url)).text == template
    with (directory / "tokenizer_config.json").open("wb") as file:
        file.truncate(50 << 20)
    refused = await register(http, adapter_id, place(bucket, directory, "huge"))
    assert (refused["error"]["code"], refused["error"]["param"]) == ("file_too_large", "tokenizer_config.json")


async def test_a_sources_template_of_earlier_processors_is_read(
    http: httpx.AsyncClient, bucket: Path, make_adapter: Callable[..., Path]
) -> None:
    template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    directory = make_adapter()
    (directory / "chat_template.json").write_text(json.dumps({"chat_template": template}))
    version = await register(http, await new_adapter(http), place(bucket, directory, "earlier"))
    assert version["state"] == "ready", version
    assert version["chat_template"] == hashlib.sha256(template.encode()).hexdigest()


@pytest.mark.parametrize("template", ["{{ messages }}", None], ids=["beside another", "alone"])
async def test_a_huge_template_of_earlier_processors_is_ignored(
    http: httpx.AsyncClient, bucket: Path, make_adapter: Callable[..., Path], template: str | None
) -> None:
    directory = make_adapter()
    with (directory / "chat_template.json").open("wb") as file:
        file.truncate((1 << 20) + 1)
    if template is not None:
        (directory / "chat_template.jinja").write_text(template)
    version = await register(http, await new_adapter(http), place(bucket, directory, "earlier"))
    assert version["state"] == "ready", version
    digest = None if template is None else hashlib.sha256(template.encode()).hexdigest()
    assert version["chat_template"] == digest


@pytest.mark.parametrize(
    ("name", "change", "code"),
    [
        pytest.param("adapter_model.safetensors", lambda path: path.unlink(), "source_not_found", id="no tensors"),
        pytest.param(
            "adapter_config.json", lambda path: path.write_bytes(b" " * (2 << 20)), "file_too_large", id="huge"
        ),
        pytest.param(
            "adapter_model.safetensors", lambda path: path.write_bytes(b""), "truncated_file", id="empty tensors"
        ),
    ],
)
async def test_bucket_contents_are_validated_like_an_upload(
    http: httpx.AsyncClient,
    bucket: Path,
    make_adapter: Callable[..., Path],
    admin_side: Any,
    name: str,
    change: Callable[[Path], None],
    code: str,
) -> None:
    adapter_id = await new_adapter(http)
    directory = make_adapter()
    change(directory / name)
    version = await register(http, adapter_id, place(bucket, directory, "one"))
    assert (version["state"], version["error"]["code"]) == ("rejected", code)
    assert list(admin_side.blobs.list_keys()) == []


async def test_quota_is_checked_before_a_source_is_copied(
    http: httpx.AsyncClient,
    bucket: Path,
    make_adapter: Callable[..., Path],
    admin_side: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    adapter_id = await new_adapter(http, "limited")
    directory = make_adapter()
    source = place(bucket, directory, "one")
    num_bytes = sum(path.stat().st_size for path in directory.iterdir())
    copied: list[str] = []
    get = LocalBlobStore.get

    def noted(store: LocalBlobStore, key: str, *arguments: Any) -> None:
        copied.append(key)
        get(store, key, *arguments)

    monkeypatch.setattr(LocalBlobStore, "get", noted)
    policies, tenant = (
        QuotaPolicies(admin_side.services.database),
        admin_side.services.accounts.tenants.get("limited").id,
    )
    policies.set(tenant, "adapter_bytes", num_bytes - 1)
    version = await register(http, adapter_id, source)
    assert (version["state"], version["error"]["code"]) == ("rejected", "insufficient_quota")
    assert copied == []
    policies.set(tenant, "adapter_bytes", num_bytes)
    assert (await register(http, adapter_id, source))["state"] == "ready"


async def test_repeated_announcement_counts_once_and_requires_the_claim(
    http: httpx.AsyncClient,
    bucket: Path,
    make_adapter: Callable[..., Path],
    admin_side: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    adapter_id = await new_adapter(http, "limited")
    directory = make_adapter()
    num_bytes = sum(path.stat().st_size for path in directory.iterdir())
    database, tenants = admin_side.services.database, admin_side.services.accounts.tenants
    QuotaPolicies(database).set(tenants.get("limited").id, "adapter_bytes", num_bytes)
    announce, claims = VersionClaims.announce, []

    def again(self: VersionClaims, claimed: ClaimedVersion, sizes: Any) -> None:
        # Recreate the state after a server died between storing the verdict and storing the blobs.
        with database.write() as connection:
            connection.execute(update(adapter_versions).values(canonical_bytes=num_bytes))
        announce(self, claimed, sizes)
        claims.append((self, claimed, sizes))

    monkeypatch.setattr(VersionClaims, "announce", again)
    assert (await register(http, adapter_id, place(bucket, directory, "one")))["state"] == "ready"

    def declared() -> Any:
        with database.read() as connection:
            return connection.execute(select(uploads.c.files)).all()

    files = declared()
    ((server, claimed, sizes),) = claims
    with pytest.raises(ClaimLost):
        announce(server, claimed, sizes)
    assert declared() == files


@pytest.mark.parametrize(
    ("source", "code"),
    [
        pytest.param("s3://operator/adapters-of-others/one", "source_not_allowed", id="prefix of a name"),
        pytest.param("s3://operator", "source_not_allowed", id="above"),
        pytest.param("s3://another/adapters/one", "source_not_allowed", id="another bucket"),
        pytest.param("s3://operator/adapters/../secrets", "invalid_source", id="traversal"),
        pytest.param("s3://operator/adapters//one", "invalid_source", id="empty part"),
        pytest.param("file:///etc", "source_not_allowed", id="directory"),
        pytest.param("http://169.254.169.254/latest", "invalid_source", id="http"),
        pytest.param("s3://operator/adapters/one?versionId=1", "invalid_source", id="query"),
        pytest.param("s3://operator/adapters/\x00", "invalid_source", id="nul"),
        pytest.param("s3://operator/adapters/" + "a/" * 600, "invalid_source", id="too long"),
        pytest.param("", "invalid_source", id="empty"),
    ],
)
def test_disallowed_source_is_refused(admin_sources: AdapterSources, source: str, code: str) -> None:
    with pytest.raises(UploadRefused) as refused:
        admin_sources.check(source)
    assert (refused.value.code, refused.value.param) == (code, "source")


async def test_only_the_operator_can_register_a_source(http: httpx.AsyncClient) -> None:
    adapter_id = await new_adapter(http)
    tenant = await new_bearer(http, "acme", ["tenant:admin"])
    url = f"/admin/v1/adapters/{adapter_id}/versions"
    for headers, body, expected in (
        (tenant, {"source": "s3://operator/adapters/one"}, (403, "insufficient_scope")),
        ({}, {"source": "s3://operator/adapters/one", "upload_id": "upl_1"}, (400, "invalid_value")),
        ({}, {}, (400, "missing_required_parameter")),
        ({}, {"source": 7}, (400, "invalid_type")),
        ({}, {"source": "s3://another/adapters/one"}, (400, "source_not_allowed")),
    ):
        response = await http.post(url, json=body, headers=headers)
        assert (response.status_code, response.json()["error"]["code"]) == expected
    assert (await http.get(url)).json()["data"] == []


def test_no_source_is_allowed_by_default() -> None:
    with pytest.raises(UploadRefused) as refused:
        AdapterSources().check("s3://operator/adapters/one")
    assert refused.value.code == "source_not_allowed"
    assert AdapterSources(["s3://operator"]).check("s3://operator/x/") == "s3://operator/x"


async def test_source_that_fails_for_an_unknown_reason_is_abandoned_when_it_expires(
    http: httpx.AsyncClient,
    bucket: Path,
    make_adapter: Callable[..., Path],
    log: list[Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(*_: object) -> None:
        raise IndexError("out of range")

    monkeypatch.setattr("loramux.adapter_store.ingest.ingest.SOURCE_LIFETIME_S", 0)
    monkeypatch.setattr("loramux.adapter_store.ingest.version_processor.JoinedSource.fetch_file", fail)
    version = await register(http, await new_adapter(http), place(bucket, make_adapter(), "malformed"))
    assert (version["state"], version["error"]["code"]) == ("rejected", "source_unavailable")
    assert "out of range" not in str(version), "only operators see the error"
    [entry] = [entry for entry in log if entry["event"] == "source_unavailable"]
    assert entry["error"] == "reading it failed: IndexError: out of range"


async def test_unreachable_bucket_is_retried_and_then_abandoned(
    http: httpx.AsyncClient, admin_side: Any, log: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    adapter_id = await new_adapter(http)
    monkeypatch.setattr("loramux.adapter_store.ingest.ingest.SOURCE_LIFETIME_S", 1)
    monkeypatch.setattr("loramux.adapter_store.ingest.version_processor.SOURCE_RETRY_S", 0.1)
    wake_up = admin_side.services.adapters.ingest.has_pending.set
    version = await register(http, adapter_id, "s3://operator/adapters/down", wake_up)
    assert (version["state"], version["error"]["code"]) == ("rejected", "source_unavailable")
    assert "10.0.0.7" not in str(version), "only operators see the address"
    tries = [entry for entry in log if entry["event"] == "source_unavailable"]
    assert len(tries) > 1
    assert "10.0.0.7" in tries[0]["error"]
