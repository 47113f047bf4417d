"""Programs of a tenant load adapters from directories, and requests see the new version at once."""

from __future__ import annotations

import asyncio
import base64
import os
import threading
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from loramux.adapter_store.ingest.ingest import Ingest
from loramux.adapter_store.ingest.worker import IngestWorker
from loramux.adapter_store.registry.aliases import AdapterAliases
from loramux.adapter_store.registry.registry import AdapterRegistry
from loramux.adapter_store.sources.adapter_sources import AdapterSources
from loramux.platform.accounts.audit_log import AuditFilter, AuditLog
from loramux.platform.listener.app import create_openai_app
from loramux.platform.runtime_adapters.load_sources import LoadSources
from loramux.platform.runtime_adapters.runtime_adapters import MAX_LOADS, RuntimeAdapters
from loramux.platform.tenant_slots import TenantQueues
from tests.adapter_store.adapter_files import AdapterFiles, AdapterMaker
from tests.adapter_store.ingest.ingest_world import DirectValidator
from tests.adapter_store.memory_blobs import MemoryBlobStore
from tests.adapter_store.small_base import make_target
from tests.platform.gateways import Gateway
from tests.platform.replicas.lab import until

pytestmark = pytest.mark.anyio
DEVELOP = ("adapters", "tenant:develop")


@dataclass(frozen=True)
class Lab:
    gateway: Gateway
    http: httpx.AsyncClient
    registry: AdapterRegistry
    validator: DirectValidator
    directory: Path
    """The directory from which acme may load adapters."""
    make: AdapterMaker
    key: str
    """A developer's key of acme."""
    adapters: RuntimeAdapters

    def write(self, name: str, seed: int = 0, **options: Any) -> Path:
        return write_adapter(self.directory / name, self.make(seed=seed, **options))

    async def post(self, path: str, body: dict[str, Any], key: str | None = None) -> httpx.Response:
        headers = {"authorization": f"Bearer {key or self.key}"}
        return await self.http.post(path, json=body, headers=headers)

    async def load(self, name: str, path: Path | str, key: str | None = None, **body: Any) -> httpx.Response:
        return await self.post("/v1/load_lora_adapter", {"lora_name": name, "lora_path": str(path), **body}, key)

    async def unload(self, name: str, key: str | None = None) -> httpx.Response:
        return await self.post("/v1/unload_lora_adapter", {"lora_name": name}, key)

    async def answered_by(self, model: str) -> str:
        """The model that answers a request."""
        response = await self.post("/v1/completions", {"model": model, "prompt": "Hi", "max_tokens": 1})
        if response.status_code != 200:
            return str(response.json()["error"]["code"])
        found = await self.http.get(f"/v1/models/{model}", headers={"authorization": f"Bearer {self.key}"})
        return str(found.json()["root"])

    @property
    def num_adapters(self) -> int:
        return len(self.registry.list_adapters(self.gateway.tenant.id, 100).data)

    def aliases(self, name: str) -> dict[int, int]:
        adapter = self.registry.find_adapter(self.gateway.tenant.id, name)
        assert adapter is not None
        targets = AdapterAliases(self.registry.database).get(adapter.id, "default").targets
        return {target.number: target.weight for target in targets}


def write_adapter(directory: Path, files: AdapterFiles) -> Path:
    directory.mkdir(parents=True)
    (directory / "adapter_config.json").write_bytes(files.config_bytes)
    (directory / "adapter_model.safetensors").write_bytes(files.tensor_bytes)
    return directory


def code_of(response: httpx.Response) -> tuple[int, str]:
    return response.status_code, response.json()["error"]["code"]


@pytest.fixture
async def lab(gateway: Gateway, threads: ThreadPoolExecutor, tmp_path: Path) -> AsyncIterator[Lab]:
    target, root = make_target(), tmp_path / "loras"
    (root / "acme").mkdir(parents=True)
    sources = LoadSources((f"file://{root}/{{tenant}}",))
    registry, validator = AdapterRegistry(gateway.database, ("base",)), DirectValidator()
    ingest = Ingest(
        registry,
        MemoryBlobStore(),
        target,
        tmp_path / "scratch",
        validator,
        sources=AdapterSources(sources.allowed),
    )
    worker = IngestWorker(ingest)
    worker.start()
    adapters = RuntimeAdapters(gateway.services, registry, ingest, sources, threads, 256)
    app = create_openai_app(gateway.services, None, adapters)
    key = gateway.key_of("acme", *DEVELOP)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://gateway") as http:
        yield Lab(gateway, http, registry, validator, root / "acme", AdapterMaker(target), key, adapters)
    worker.stop()


async def test_a_name_can_be_loaded_called_replaced_and_unloaded(lab: Lab) -> None:
    first, second = lab.write("one", seed=1), lab.write("two", seed=2)
    loaded = await lab.load("policy", first)
    assert (loaded.status_code, loaded.text) == (200, "Success: LoRA adapter 'policy' added successfully.")
    assert await lab.answered_by("policy") == "acme/policy@1"
    assert code_of(await lab.load("policy", second)) == (400, "adapter_already_loaded")
    assert await lab.answered_by("policy") == "acme/policy@1"
    assert (await lab.load("acme/policy", second, load_inplace=True)).status_code == 200
    assert await lab.answered_by("policy") == "acme/policy@2"
    assert await lab.answered_by("policy@1") == "acme/policy@1"
    unloaded = await lab.unload("policy")
    assert (unloaded.status_code, unloaded.text) == (200, "Success: LoRA adapter 'policy' removed successfully.")
    assert await lab.answered_by("policy") == "model_not_found"
    assert code_of(await lab.unload("policy")) == (404, "model_not_found")
    # The same files again become no third version of the same bytes, and the name stands for them.
    assert (await lab.load("policy", first)).status_code == 200
    assert await lab.answered_by("policy") == "acme/policy@1"
    reader = lab.gateway.services.callers.api_keys.authenticate_bearer(lab.key)
    assert reader is not None
    entries = AuditLog(lab.gateway.database).list(reader, AuditFilter(actor=reader.key_id), 50).data
    by_the_key = {entry.action for entry in entries}
    assert {"adapter.create", "version.create", "alias.set", "adapter.disable", "adapter.enable"} <= by_the_key


async def test_a_later_load_of_a_name_wins_over_an_earlier_slow_one(lab: Lab) -> None:
    await lab.load("policy", lab.write("one", seed=1))
    slow, quick = lab.write("slow", seed=2), lab.write("quick", seed=3)
    both = await asyncio.gather(
        lab.load("policy", slow, load_inplace=True), lab.load("policy", quick, load_inplace=True)
    )
    assert [response.status_code for response in both] == [200, 200]
    assert lab.aliases("policy") == {3: 100}


async def test_an_unload_lets_64_running_requests_finish(lab: Lab) -> None:
    assert (await lab.load("policy", lab.write("one", seed=1))).status_code == 200
    engine, may_end = lab.gateway.engine, asyncio.Event()
    submit = engine.submit

    async def held(*arguments: Any) -> AsyncIterator[Any]:
        await may_end.wait()
        async for item in submit(*arguments):
            yield item

    engine.submit = held  # type: ignore[method-assign]
    body = {"model": "policy", "prompt": "Hi", "max_tokens": 4}
    running = [asyncio.create_task(lab.post("/v1/completions", body)) for _ in range(64)]
    requests = lab.gateway.services.run.requests
    await until(lambda: requests.num_running == 64)
    assert (await lab.unload("policy")).status_code == 200
    assert code_of(await lab.post("/v1/completions", body)) == (404, "model_not_found")
    may_end.set()
    answers = await asyncio.gather(*running)
    assert [answer.status_code for answer in answers] == [200] * 64
    assert {answer.headers["x-loramux-adapter"] for answer in answers} == {"acme/policy@1"}
    assert {answer.json()["usage"]["completion_tokens"] for answer in answers} == {4}


async def test_only_allowed_directories_of_the_own_tenant_can_be_loaded(lab: Lab, tmp_path: Path) -> None:
    outside = write_adapter(tmp_path / "outside", lab.make())
    rival = write_adapter(lab.directory.parent / "rival" / "secret", lab.make())
    (lab.directory / "link").symlink_to(rival)
    (lab.directory / "files").mkdir()
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        (lab.directory / "files" / name).symlink_to(rival / name)
    os.mkfifo(lab.write("pipe") / "chat_template.jinja")
    for path, expected in {
        str(outside): (404, "source_not_allowed"),
        str(rival): (404, "source_not_allowed"),
        f"{lab.directory}/../rival/secret": (400, "invalid_source"),
        f"{lab.directory}/one/../../rival/secret": (400, "invalid_source"),
        f"{lab.directory}": (400, "source_not_found"),
        f"{lab.directory}/missing": (404, "source_not_found"),
        f"{lab.directory}/link": (400, "invalid_source"),
        f"{lab.directory}/files": (400, "invalid_source"),
        f"{lab.directory}/pipe": (400, "invalid_source"),
        "relative/path": (400, "invalid_source"),
        "s3://bucket/adapter": (404, "source_not_allowed"),
        f"file://{rival}": (404, "source_not_allowed"),
        "/" + "x" * 999: (400, "invalid_source"),
        "\0": (400, "invalid_source"),
    }.items():
        refused = await lab.load("policy", path)
        assert (code_of(refused), refused.json()["error"]["param"]) == (expected, "lora_path"), path
    assert await lab.answered_by("policy") == "model_not_found"
    assert lab.validator.num_calls == 0
    # A mistyped path leaves no adapter behind. The files themselves are looked at only when the version is fetched.
    assert code_of(await lab.load("other", f"{lab.directory}/missing")) == (404, "source_not_found")
    assert lab.registry.find_adapter(lab.gateway.tenant.id, "other") is None


async def test_a_developer_cannot_replace_or_unload_what_was_pushed(lab: Lab) -> None:
    lab.gateway.add_adapter("acme", "production")
    path = lab.write("one")
    admin = lab.gateway.key_of("acme", "adapters", "tenant:admin")
    for refused in (await lab.load("production", path, load_inplace=True), await lab.unload("production")):
        assert code_of(refused) == (403, "insufficient_scope")
    assert await lab.answered_by("production") == "acme/production@1"
    assert (await lab.load("production", path, admin, load_inplace=True)).status_code == 200
    assert await lab.answered_by("production") == "acme/production@2"
    assert (await lab.unload("production", admin)).status_code == 200


async def test_other_keys_and_other_tenants_are_refused(lab: Lab) -> None:
    path = lab.write("one")
    assert (await lab.load("policy", path)).status_code == 200
    rival = lab.gateway.key_of("rival", *DEVELOP)
    assert code_of(await lab.load("policy", path, lab.gateway.key)) == (403, "insufficient_scope")
    assert code_of(await lab.unload("policy", lab.gateway.key)) == (403, "insufficient_scope")
    assert code_of(await lab.load("acme/policy", path, rival, load_inplace=True)) == (400, "invalid_name")
    assert code_of(await lab.unload("policy", rival)) == (404, "model_not_found")
    assert (await lab.http.post("/v1/unload_lora_adapter", json={"lora_name": "policy"})).status_code == 401
    assert await lab.answered_by("policy") == "acme/policy@1"


@pytest.mark.parametrize("name", ["base", "policy@1", "policy:default", "Policy", "../x", "a" * 64])
async def test_names_that_no_adapter_can_have(lab: Lab, name: str) -> None:
    response = await lab.load(name, lab.write("one"))
    assert response.status_code == 400
    assert response.json()["error"]["code"] in ("invalid_name", "reserved_name")
    assert response.json()["error"]["param"] == "lora_name"


async def test_a_policy_can_be_loaded_before_its_first_step(lab: Lab) -> None:
    files = lab.make()
    files.tensors = {name: 0 * tensor if "lora_B" in name else tensor for name, tensor in files.tensors.items()}
    loaded = await lab.load("policy", write_adapter(lab.directory / "untrained", files))
    assert loaded.status_code == 200, loaded.text
    assert await lab.answered_by("policy") == "acme/policy@1"


async def test_a_tenants_further_loads_wait_and_their_number_is_limited(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    queues = TenantQueues(MAX_LOADS, 2, 600.0, "adapters are being loaded", "too_many_loads")
    monkeypatch.setattr(lab.adapters, "_loads", queues)
    let_go = threading.Event()
    lab.validator.meanwhile = lambda: assert_set(let_go)
    paths = [lab.write(f"{number}", seed=number) for number in range(MAX_LOADS + 2)]
    loads = [asyncio.ensure_future(lab.load(f"policy-{number}", path)) for number, path in enumerate(paths)]
    tenant_id = lab.gateway.tenant.id
    await until(lambda: (queues.num_entered(tenant_id), lab.num_adapters) == (MAX_LOADS + 2, MAX_LOADS))
    # The two others wait, and have created nothing.
    refused = await lab.load("policy", paths[0])
    assert code_of(refused) == (429, "too_many_loads")
    assert refused.headers["retry-after"]
    assert lab.num_adapters == MAX_LOADS
    let_go.set()
    assert [response.status_code for response in await asyncio.gather(*loads)] == [200] * len(paths)
    assert (await lab.load("policy", paths[0])).status_code == 200


async def test_a_load_whose_key_is_revoked_while_it_waits_is_refused(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    queues = TenantQueues(1, 1, 600.0, "adapters are being loaded", "too_many_loads")
    monkeypatch.setattr(lab.adapters, "_loads", queues)
    let_go = threading.Event()
    lab.validator.meanwhile = lambda: assert_set(let_go)
    running = asyncio.ensure_future(lab.load("policy", lab.write("one", seed=1)))
    await until(lambda: lab.num_adapters == 1)
    keys = lab.gateway.services.callers.api_keys
    key = keys.create(lab.gateway.tenant.id, "trainer", DEVELOP)
    waiting = asyncio.ensure_future(lab.load("other", lab.write("two", seed=2), key.secret))
    await until(lambda: queues.num_entered(lab.gateway.tenant.id) == 2)
    keys.revoke(key.key.id)
    let_go.set()
    assert (await running).status_code == 200
    assert code_of(await waiting) == (401, "invalid_api_key")
    assert lab.num_adapters == 1


async def test_a_load_does_not_wait_forever_for_its_turn(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    queues = TenantQueues(1, 1, 0.0, "adapters are being loaded", "too_many_loads")
    monkeypatch.setattr(lab.adapters, "_loads", queues)
    let_go = threading.Event()
    lab.validator.meanwhile = lambda: assert_set(let_go)
    running = asyncio.ensure_future(lab.load("policy", lab.write("one", seed=1)))
    await until(lambda: lab.num_adapters == 1)
    refused = await lab.load("other", lab.write("two", seed=2))
    assert code_of(refused) == (503, "too_many_loads")
    assert refused.headers["retry-after"]
    let_go.set()
    assert (await running).status_code == 200
    assert (await lab.load("other", lab.directory / "two")).status_code == 200


def assert_set(event: threading.Event) -> None:
    assert event.wait(60)


async def test_files_that_are_refused_change_nothing(lab: Lab) -> None:
    assert (await lab.load("policy", lab.write("one", seed=1))).status_code == 200
    broken = lab.write("broken", seed=2)
    (broken / "adapter_model.safetensors").write_bytes(b"\x80\x04pickled")
    refused = await lab.load("policy", broken, load_inplace=True)
    assert refused.status_code == 400
    assert "adapter_model.safetensors" in refused.json()["error"]["message"]
    assert await lab.answered_by("policy") == "acme/policy@1"


async def test_an_adapter_that_the_engine_cannot_load_changes_nothing(lab: Lab) -> None:
    assert (await lab.load("policy", lab.write("one", seed=1))).status_code == 200
    lab.gateway.engine.die()
    response = await lab.load("policy", lab.write("two", seed=2), load_inplace=True)
    assert code_of(response) == (503, "engine_unavailable")
    lab.gateway.engine.revive()
    assert await lab.answered_by("policy") == "acme/policy@1"


async def test_the_calls_of_sglang_and_of_trainers(lab: Lab) -> None:
    loaded = await lab.post("/load_lora_adapter", {"lora_name": "policy", "lora_path": str(lab.write("one"))})
    models = {"policy": "acme/policy@1"}
    assert loaded.json() == {"success": True, "error_message": None, "loaded_adapters": models}
    unloaded = await lab.post("/unload_lora_adapter", {"lora_name": "policy"})
    assert unloaded.json() == {"success": True, "error_message": None, "loaded_adapters": {}}
    # Some trainers can send a key only in the URL of the server.
    basic = {"authorization": "Basic " + base64.b64encode(f"trainer:{lab.key}".encode()).decode()}
    info = await lab.http.get("/server_info", params={"config_format": "json"}, headers=basic)
    config = info.json()["vllm_config"]
    assert config["lora_config"] == {"max_lora_rank": 256, "max_loras": 256}
    assert config["model_config"]["dtype"] == "torch.float32"
    for path in ("/pause?mode=keep", "/resume"):
        assert (await lab.http.post(path, headers=basic)).json() == {"status": "running"}
    for wrong in ("Basic ???", "Basic " + base64.b64encode(b"\xff:\xff").decode(), "Basic " + "QQ=="):
        assert (await lab.http.get("/server_info", headers={"authorization": wrong})).status_code == 401


async def test_without_sources_there_are_no_such_calls(lab: Lab) -> None:
    app = create_openai_app(lab.gateway.services, None)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://gateway") as http:
        for path in ("/v1/load_lora_adapter", "/load_lora_adapter", "/pause"):
            response = await http.post(path, json={}, headers={"authorization": f"Bearer {lab.key}"})
            assert response.status_code == 404


async def test_an_additional_gateway_says_where_to_send_calls_that_it_cannot_do(lab: Lab) -> None:
    app = create_openai_app(lab.gateway.services, None, is_additional=True)
    key = {"authorization": f"Bearer {lab.key}"}
    calls = [("POST", path) for path in ("/v1/load_lora_adapter", "/load_lora_adapter", "/v1/unload_lora_adapter")]
    calls += [("GET", "/server_info"), ("GET", "/v1/batches"), ("POST", "/v1/files"), ("GET", "/v1/files/file-1")]
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://gateway") as http:
        for method, path in calls:
            assert code_of(await http.request(method, path, json={}, headers=key)) == (404, "not_on_this_gateway")
            assert (await http.request(method, path, json={})).status_code == 401
        assert (await http.post("/pause", headers=key)).status_code == 200


@pytest.mark.parametrize(
    ("prefix", "is_allowed"),
    [
        ("file:///srv/{tenant}", True),
        ("file:///srv/{tenant}/policies", True),
        ("s3://bucket/{tenant}", True),
        ("hf://owner", True),
        ("file:///{tenant}", False),
        ("file:///srv/x{tenant}", False),
        ("file:///srv/{tenant}/{tenant}", False),
        ("s3://{tenant}", False),
        ("hf://{tenant}", False),
        ("/srv", False),
        ("file:///srv/../etc", False),
    ],
)
def test_prefixes_of_sources(prefix: str, is_allowed: bool) -> None:
    if is_allowed:
        assert LoadSources((prefix,)).allowed
        return
    with pytest.raises(ValueError, match="is not a source"):
        LoadSources((prefix,))
