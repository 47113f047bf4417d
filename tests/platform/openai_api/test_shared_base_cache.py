"""With `share_base_cache`, an adapter computes the last tokens of a prompt, and the base computes the rest."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from loramux.adapter_store.formats.files.file_names import TEMPLATE_FILE, VOCABULARY_FILE
from loramux.adapter_store.formats.version_files.adapter_task import EMBEDDING_TASK
from loramux.adapter_store.formats.version_files.added_vocabulary import (
    AddedToken,
    AddedVocabulary,
    encode_added_vocabulary,
)
from loramux.adapter_store.registry.aliases import AdapterAliases, AliasSettings, change_alias
from loramux.adapter_store.registry.registry import AdapterRegistry
from loramux.adapter_store.registry.sharing import AdapterGrants
from loramux.engine.protocol.messages import Add
from tests.platform.gateways import Gateway
from tests.platform.ready_adapters import digest_of

pytestmark = pytest.mark.anyio

OWN = 4
DIGEST = digest_of("acme/support@1")
PROMPT = list(range(300, 310))


@pytest.fixture
def shared(gateway: Gateway) -> Gateway:
    share(gateway, gateway.add_adapter("acme", "support"), {1: 1})
    return gateway


def share(gateway: Gateway, adapter_id: str, weights: dict[int, int], alias: str = "default") -> None:
    AdapterAliases(gateway.database).set(adapter_id, alias, weights, share_base_cache=OWN)


async def post(gateway: Gateway, path: str = "/v1/completions", key: str | None = None, **body: Any) -> httpx.Response:
    gateway.engine.adds.clear()
    headers = {"anthropic-version": "2023-06-01"}
    if key is not None:
        headers["authorization"] = f"Bearer {key}"
    response = await gateway.http.post(path, json={"model": "support", **body}, headers=headers)
    assert response.status_code == 200, response.text
    return response


async def adds(gateway: Gateway, path: str = "/v1/completions", key: str | None = None, **body: Any) -> list[Add]:
    await post(gateway, path, key, **body)
    return list(gateway.engine.adds)


async def placed(gateway: Gateway, **body: Any) -> list[tuple[str | None, int]]:
    return [(add.digest, add.activation) for add in await adds(gateway, max_tokens=1, **body)]


@pytest.mark.parametrize(
    ("prompt", "activation"),
    [(PROMPT, 6), (PROMPT[: OWN + 1], 1), (PROMPT[:OWN], 0), (PROMPT[:1], 0)],
    ids=["long", "one token more", "as many tokens", "fewer"],
)
async def test_the_adapter_computes_the_last_tokens(shared: Gateway, prompt: list[int], activation: int) -> None:
    assert await placed(shared, prompt=prompt) == [(DIGEST, activation)]
    [event] = shared.usage()
    assert (event.model, event.prompt_tokens) == ("acme/support@1", len(prompt))


async def test_each_prompt_and_choice_has_its_position_after_truncation(shared: Gateway) -> None:
    assert await placed(shared, prompt=[PROMPT, PROMPT[:6]], n=2) == [(DIGEST, 6)] * 2 + [(DIGEST, 2)] * 2
    assert await placed(shared, prompt=PROMPT, truncate_prompt_tokens=7) == [(DIGEST, 3)]


SAID = [{"role": "user", "content": "the harbour is open"}]
SURFACES: list[tuple[str, dict[str, Any]]] = [
    ("/v1/completions", {"prompt": "the harbour is open", "max_tokens": 1}),
    ("/v1/chat/completions", {"messages": SAID, "max_tokens": 1}),
    ("/v1/responses", {"input": "the harbour is open", "max_output_tokens": 1, "store": False}),
    ("/v1/messages", {"messages": SAID, "max_tokens": 1}),
    ("/invocations", {"messages": SAID, "max_tokens": 1}),
]


@pytest.mark.parametrize(("path", "body"), SURFACES, ids=[path for path, _ in SURFACES])
async def test_all_surfaces_that_generate_share(gateway: Gateway, path: str, body: dict[str, Any]) -> None:
    template = b"{% for message in messages %}{{ message.content }}{% endfor %} answer:"
    share(gateway, gateway.add_adapter("acme", "support", files={TEMPLATE_FILE: template}), {1: 1})
    [add] = await adds(gateway, path, **body)
    assert len(add.prompt) > OWN
    assert (add.digest, add.activation) == (DIGEST, len(add.prompt) - OWN)
    assert (await adds(gateway, path, **body, model="support@1"))[0].activation == 0


async def test_a_header_says_that_an_answer_is_approximate(shared: Gateway) -> None:
    async def told(**body: Any) -> str | None:
        return (await post(shared, **body)).headers.get("x-loramux-share-base-cache")

    assert await told(prompt=PROMPT, max_tokens=1) == str(OWN)
    assert await told(prompt=PROMPT, max_tokens=1, stream=True) == str(OWN)
    assert await told(prompt=[PROMPT[:OWN], PROMPT], max_tokens=1) == str(OWN)
    # These answers are the adapter's alone.
    assert await told(prompt=PROMPT[:OWN], max_tokens=1) is None
    assert await told(prompt=PROMPT, max_tokens=1, prompt_logprobs=0) is None
    assert await told(prompt=PROMPT, max_tokens=1, model="support@1") is None
    assert await told(path="/v1/embeddings", input=PROMPT) is None


async def test_only_names_of_the_alias_share(gateway: Gateway) -> None:
    adapter_id = gateway.add_adapter("acme", "support", versions=2)
    share(gateway, adapter_id, {1: 1, 2: 1}, alias="beta")
    whole = [("support", 0), ("support@1", 0), (f"support@sha256:{DIGEST}", 0)]
    for model, activation in [*whole, ("support:beta", 6), ("acme/support:beta", 6)]:
        assert [one for _, one in await placed(gateway, prompt=PROMPT, model=model)] == [activation], model
    # All versions of the alias share.
    found = [await placed(gateway, prompt=PROMPT, model="support:beta", user=f"user {number}") for number in range(12)]
    assert {one for [one] in found} == {(DIGEST, 6), (digest_of("acme/support@2"), 6)}


async def test_another_tenant_shares_within_its_own_cache(shared: Gateway) -> None:
    adapter = AdapterRegistry(shared.database).find_adapter(shared.tenant.id, "support")
    assert adapter is not None
    secret = shared.key_of("globex")
    other = shared.services.callers.tenants.get("globex")
    assert other is not None
    AdapterGrants(shared.database).add(adapter, other.id)
    [own] = await adds(shared, prompt=PROMPT, max_tokens=1)
    [granted] = await adds(shared, prompt=PROMPT, max_tokens=1, model="acme/support", key=secret)
    assert (granted.digest, granted.activation) == (own.digest, own.activation) == (DIGEST, 6)
    assert own.isolation_key != granted.isolation_key


async def test_log_probabilities_of_prompts_are_the_adapters(shared: Gateway) -> None:
    assert await placed(shared, prompt=PROMPT, prompt_logprobs=0) == [(DIGEST, 0)]
    assert await placed(shared, prompt=PROMPT, echo=True, logprobs=1) == [(DIGEST, 0)]
    assert await placed(shared, prompt=PROMPT, logprobs=1) == [(DIGEST, 6)]


async def test_embeddings_are_the_adapters(shared: Gateway) -> None:
    [add] = await adds(shared, "/v1/embeddings", input=PROMPT)
    assert (add.digest, add.activation) == (DIGEST, 0)


async def test_an_alias_can_move_to_versions_that_cannot_share(gateway: Gateway) -> None:
    """The alias keeps its option, and these versions answer as without it."""
    token = AddedToken(gateway.services.prompts.tokenizer.num_tokens, "[x]", False, False, False, False, False)
    files = {VOCABULARY_FILE: encode_added_vocabulary(AddedVocabulary(1026, (token,)))}
    ids = [
        gateway.add_adapter("acme", "adder", files=files),
        gateway.add_adapter("acme", "checker", invocation_tokens=PROMPT[2:4]),
        gateway.add_adapter("acme", "search", task=EMBEDDING_TASK),
    ]
    for adapter_id in ids:
        present = AdapterAliases(gateway.database).get(adapter_id, "default")
        with gateway.database.write() as connection:
            settings = AliasSettings(share_base_cache=OWN)
            change_alias(connection, adapter_id, "default", present.targets, "system", "set", 0, settings)
    assert await placed(gateway, prompt=PROMPT, model="adder") == [(digest_of("acme/adder@1"), 0)]
    assert await placed(gateway, prompt=PROMPT, model="search") == [(digest_of("acme/search@1"), 0)]
    assert await placed(gateway, prompt=PROMPT, model="checker") == [(digest_of("acme/checker@1"), 2)]
    assert await placed(gateway, prompt=PROMPT[4:], model="checker") == [(None, 0)]
