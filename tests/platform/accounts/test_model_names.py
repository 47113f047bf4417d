from __future__ import annotations

import json
from typing import Any

import openai
import pytest

from loramux.adapter_store.registry.aliases import AdapterAliases
from loramux.adapter_store.registry.registry import AdapterRegistry
from loramux.adapter_store.registry.sharing import AdapterGrants
from loramux.adapter_store.registry.version_states import VersionStates
from loramux.platform.accounts.model_names import AdapterName, parse_adapter_name
from loramux.platform.accounts.tenants import TenantChanges
from loramux.platform.errors import InvalidRequest


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("support", AdapterName(None, "support")),
        ("acme/support", AdapterName("acme", "support")),
        ("acme/support@3", AdapterName("acme", "support", version=3)),
        ("support@3", AdapterName(None, "support", version=3)),
        ("support:canary", AdapterName(None, "support", alias="canary")),
        ("support@sha256:0123456789ab", AdapterName(None, "support", digest_prefix="0123456789ab")),
        ("a/b/support", AdapterName("a/b", "support")),
        ("", None),
        ("/support", None),
        ("acme/", None),
        ("support@", None),
        ("support:", None),
        ("support@0", None),
        ("support@-1", None),
        ("support@1.0", None),
        ("support@latest", None),
        ("support@99999999999", None),
        ("support@sha256:0123", None),
        ("support@sha256:0123456789AB", None),
        ("support@١", None),
    ],
    ids=repr,
)
def test_names_are_split_at_their_suffix(name: str, expected: AdapterName | None) -> None:
    assert parse_adapter_name(name) == expected


@pytest.mark.parametrize("name", ["a@1:b", "a:b@1", "a:@", "a@sha256:0123456789ab:b"])
def test_both_suffixes_are_refused(name: str) -> None:
    with pytest.raises(InvalidRequest, match="not both"):
        parse_adapter_name(name)


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("name", "version"),
    [("support", 2), ("acme/support", 2), ("support@1", 1), ("acme/support@2", 2), ("support:default", 2)],
)
async def test_adapter_names_select_versions_and_digests(gateway: Any, name: str, version: int) -> None:
    gateway.add_adapter("acme", "support", versions=2)
    raw = await gateway.openai.completions.with_raw_response.create(model=name, prompt="a", max_tokens=1)
    assert raw.headers["x-loramux-adapter"] == f"acme/support@{version}"
    assert raw.headers["x-loramux-resolved-model"] == f"acme/support@{version}"
    assert raw.parse().model == name
    [event] = gateway.usage()
    assert event.model == f"acme/support@{version}"
    assert event.adapter_id.startswith("ada_")
    [add] = gateway.engine.adds
    assert add.digest is not None
    await gateway.openai.completions.create(model=f"support@sha256:{add.digest[:12]}", prompt="a", max_tokens=1)
    assert gateway.engine.adds[1].digest == add.digest


@pytest.mark.anyio
async def test_every_answer_and_chunk_has_the_fingerprint_of_its_version(gateway: Any) -> None:
    gateway.add_adapter("acme", "support", versions=2, files={"generation_config.json": b"{}"})
    bodies = {
        "/v1/completions": {"prompt": "a", "max_tokens": 3},
        "/v1/chat/completions": {"messages": [{"role": "user", "content": "a"}], "max_tokens": 3},
    }
    found = set()
    for path, body in bodies.items():
        for options in ({}, {"stream": True, "stream_options": {"include_usage": True}}):
            answer = await gateway.http.post(path, json={"model": "support", **body, **options})
            assert answer.status_code == 200, answer.text
            lines = [line.removeprefix("data: ") for line in answer.text.splitlines() if line]
            documents = [json.loads(line) for line in lines if line != "[DONE]"]
            assert len(documents) > 2 if options else len(documents) == 1
            found |= {document["system_fingerprint"] for document in documents}
            found.add(answer.headers["x-loramux-fingerprint"])
            base = await gateway.http.post(path, json={"model": "base", **body, **options})
            assert base.status_code == 200
            assert "fingerprint" not in base.text + str(base.headers)
    [fingerprint] = found
    assert fingerprint.startswith("sha256:")
    # The digest covers the optional files, and the fingerprint names the version.
    assert fingerprint != f"sha256:{gateway.engine.adds[0].digest}"
    body = {"model": f"support@{fingerprint}", "prompt": "a", "max_tokens": 1}
    again = await gateway.http.post("/v1/completions", json=body)
    assert again.headers["x-loramux-adapter"] == "acme/support@2"


@pytest.mark.anyio
async def test_user_keeps_one_version_of_a_split_alias(gateway: Any) -> None:
    adapter_id = gateway.add_adapter("acme", "support", versions=2)
    aliases = AdapterAliases(gateway.database)
    aliases.set(adapter_id, "default", {1: 50, 2: 50})

    async def version(**fields: str) -> str:
        answer = await gateway.openai.completions.with_raw_response.create(
            model="support", prompt="a", max_tokens=1, **fields
        )
        return str(answer.headers["x-loramux-adapter"])

    drawn = {user: await version(user=user) for user in map(str, range(32))}
    assert set(drawn.values()) == {"acme/support@1", "acme/support@2"}
    assert {user: await version(user=user) for user in drawn} == drawn
    # The version for a request without a user is drawn at random, and 32 equal draws are practically impossible.
    assert len({await version() for _ in range(32)}) == 2
    assert len({await version(user="one") for _ in range(6)}) == 1
    aliases.rollback(adapter_id, "default")
    assert {await version(user=user) for user in drawn} == {"acme/support@2"}


@pytest.mark.anyio
async def test_grantee_calls_and_pays_for_a_granted_adapter(gateway: Any) -> None:
    adapter_id = gateway.add_adapter("other", "secret")
    grants, registry = AdapterGrants(gateway.database), AdapterRegistry(gateway.database)
    adapter = registry.get_adapter(adapter_id)
    assert adapter is not None
    grants.add(adapter, gateway.tenant.id)
    assert [model.id async for model in gateway.openai.models.list()] == ["base", "other/secret"]
    await gateway.openai.completions.create(model="other/secret:default", prompt="a", max_tokens=1)
    [event], [add] = gateway.usage(), gateway.engine.adds
    assert (event.tenant_id, event.model) == (gateway.tenant.id, "other/secret@1")
    assert add.share_key == gateway.tenant.id, "the caller's share and prefix cache, not the owner's"
    with pytest.raises(openai.NotFoundError):
        await gateway.openai.completions.create(model="secret", prompt="a", max_tokens=1)
    grants.remove(adapter_id, gateway.tenant.id)
    refused = await gateway.http.post("/v1/completions", json={"model": "other/secret", "prompt": "a"})
    unknown = await gateway.http.post("/v1/completions", json={"model": "other/absent", "prompt": "a"})
    assert refused.status_code == unknown.status_code == 404
    assert refused.text.replace("secret", "absent") == unknown.text


@pytest.mark.anyio
async def test_archived_or_quarantined_versions_are_404_and_never_the_base(gateway: Any) -> None:
    adapter_id = gateway.add_adapter("acme", "support", versions=2)
    registry = AdapterRegistry(gateway.database)
    states = VersionStates(gateway.database, registry)
    states.archive(adapter_id, 1)
    states.quarantine(adapter_id, 2)
    for name in ("support", "support@1", "support@2", "support:default"):
        response = await gateway.http.post("/v1/completions", json={"model": name, "prompt": "a"})
        assert (response.status_code, response.json()["error"]["code"]) == (404, "model_not_found"), name
    assert [model.id async for model in gateway.openai.models.list()] == ["base"]
    assert gateway.engine.adds == []


@pytest.mark.anyio
async def test_tenants_do_not_share_prefixes_or_scheduling(gateway: Any) -> None:
    other = gateway.openai.with_options(api_key=gateway.key_of("other"))
    for client in (gateway.openai, other):
        await client.completions.create(model="base", prompt="a", max_tokens=1)
    first, second = gateway.engine.adds
    assert first.isolation_key != second.isolation_key
    assert len(first.isolation_key) == 32
    assert first.share_key != second.share_key
    assert first.digest is None


@pytest.mark.anyio
async def test_requests_carry_the_tenants_host_memory_floor(gateway: Any) -> None:
    gateway.add_adapter("acme", "support")
    tenants = gateway.services.callers.tenants
    tenants.update(tenants.get("acme").id, TenantChanges(host_floor_bytes=1 << 20), lambda _: None)
    other = gateway.openai.with_options(api_key=gateway.key_of("other"))
    for client, model in ((gateway.openai, "support"), (other, "base")):
        await client.completions.create(model=model, prompt="a", max_tokens=1)
    assert [add.host_floor_bytes for add in gateway.engine.adds] == [1 << 20, 0]


@pytest.mark.anyio
async def test_unknown_and_foreign_models_return_identical_404s(gateway: Any) -> None:
    gateway.add_adapter("acme", "support")
    gateway.add_adapter("other", "secret")
    bodies = []
    for name in ("other/secret", "other/absent", "absent/secret", "acme/absent", "acme/support@9", "Base", "BASE\x00"):
        response = await gateway.http.post("/v1/completions", json={"model": name, "prompt": "a"})
        assert response.status_code == 404
        bodies.append(response.content.replace(repr(name)[1:-1].replace("\\", "\\\\").encode(), b"NAME"))
    assert len(set(bodies)) == 1
    assert b'"code":"model_not_found"' in bodies[0]
    with pytest.raises(openai.NotFoundError) as caught:
        await gateway.openai.chat.completions.create(model="nope", messages=[{"role": "user", "content": "a"}])
    assert caught.value.code == "model_not_found"
    assert gateway.usage() == []


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("scopes", "base_status", "adapter_status"),
    [
        (("base",), 200, 404),
        (("adapters",), 404, 200),
        (("base", "adapters", "tenant:admin"), 200, 200),
        (("tenant:admin",), 403, 403),
        (("tenant:read",), 403, 403),
    ],
    ids=lambda value: "+".join(value) if isinstance(value, tuple) else "",
)
async def test_scopes_limit_the_callable_models(
    gateway: Any, scopes: tuple[str, ...], base_status: int, adapter_status: int
) -> None:
    gateway.add_adapter("acme", "support")
    gateway.http.headers["authorization"] = f"Bearer {gateway.key_of('acme', *scopes)}"
    for name, status in (("base", base_status), ("support", adapter_status)):
        response = await gateway.http.post("/v1/completions", json={"model": name, "prompt": "a"})
        assert response.status_code == status, response.text
    listed = await gateway.http.get("/v1/models")
    if base_status == 403:
        assert listed.status_code == 403
    else:
        names = [model["id"] for model in listed.json()["data"]]
        assert names == [n for n, s in (("base", base_status), ("acme/support", adapter_status)) if s == 200]


@pytest.mark.anyio
async def test_operator_key_cannot_run_inference(gateway: Any) -> None:
    client = gateway.openai.with_options(api_key="the operator's key of 32 characters")
    with pytest.raises(openai.PermissionDeniedError):
        await client.completions.create(model="base", prompt="a")


@pytest.mark.anyio
async def test_models_are_listed_and_retrieved_by_any_name(gateway: Any) -> None:
    gateway.add_adapter("acme", "support", versions=2)
    gateway.add_adapter("acme", "billing")
    gateway.add_adapter("other", "secret")
    models = [model async for model in gateway.openai.models.list()]
    assert [model.id for model in models] == ["base", "acme/billing", "acme/support"]
    assert all(model.object == "model" and model.created > 1_600_000_000 for model in models)
    model = await gateway.openai.models.retrieve("acme/support@1")
    assert (model.id, model.owned_by) == ("acme/support@1", "acme")
    described = {"root": "acme/support@1", "parent": "base", "max_model_len": 256, "task": "generation"}
    assert model.model_extra == {**described, "quantization": None}
    gateway.engine.quantization = "int4"
    model = await gateway.openai.models.retrieve("acme/support@1")
    assert model.model_extra == {**described, "quantization": "int4"}
    with pytest.raises(openai.NotFoundError):
        await gateway.openai.models.retrieve("other/secret")
