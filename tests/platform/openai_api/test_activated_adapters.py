"""For an activated adapter, the engine learns where each prompt activates it."""

from __future__ import annotations

from typing import Any

import pytest

from loramux.adapter_store.formats.files.file_names import TEMPLATE_FILE
from tests.platform.gateways import Gateway
from tests.platform.ready_adapters import digest_of

pytestmark = pytest.mark.anyio

TOKENS = (300, 301)
DIGEST = digest_of("acme/checker@1")


@pytest.fixture
def activated(gateway: Gateway) -> Gateway:
    gateway.add_adapter("acme", "checker", invocation_tokens=TOKENS)
    return gateway


async def placed(gateway: Gateway, prompt: Any, **fields: Any) -> list[tuple[str | None, int]]:
    """The adapter and its activation in each sequence of a completion."""
    gateway.engine.adds.clear()
    body = {"model": "checker", "prompt": prompt, "max_tokens": 1, **fields}
    response = await gateway.http.post("/v1/completions", json=body)
    assert response.status_code == 200, response.text
    assert response.headers["x-loramux-adapter"] == "acme/checker@1"
    return [(add.digest, add.activation) for add in gateway.engine.adds]


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ([7, 8, *TOKENS], (DIGEST, 2)),
        ([*TOKENS, 7, 8], (DIGEST, 0)),
        ([7, *TOKENS, 8, 9], (DIGEST, 1)),
        ([7, *TOKENS, 8, *TOKENS, 9], (DIGEST, 4)),
        ([7, 8, 9], (None, 0)),
        ([7, TOKENS[0]], (None, 0)),
    ],
    ids=["end", "beginning", "middle", "twice", "never", "only the first token"],
)
async def test_the_last_invocation_activates_the_adapter(
    activated: Gateway, prompt: list[int], expected: tuple[str | None, int]
) -> None:
    assert await placed(activated, prompt) == [expected]
    [event] = activated.usage()
    # The bill names the version even if the base answered alone.
    assert (event.model, event.prompt_tokens) == ("acme/checker@1", len(prompt))


async def test_each_prompt_and_each_choice_has_its_activation(activated: Gateway) -> None:
    prompts = [[7, *TOKENS], [7, 8], [*TOKENS]]
    expected = [(DIGEST, 1), (None, 0), (DIGEST, 0)]
    assert await placed(activated, prompts, n=2) == [one for one in expected for _ in range(2)]


async def test_the_truncated_prompt_decides(activated: Gateway) -> None:
    prompt = [7, *TOKENS, 8, 9, *TOKENS, 10]
    assert await placed(activated, prompt, truncate_prompt_tokens=4) == [(DIGEST, 1)]
    assert await placed(activated, prompt, truncate_prompt_tokens=3) == [(DIGEST, 0)]
    # Truncation leaves only the second of the two tokens.
    assert await placed(activated, prompt, truncate_prompt_tokens=2) == [(None, 0)]


async def test_text_and_conversations_are_searched_as_tokens(gateway: Gateway) -> None:
    encode = gateway.services.prompts.tokenizer.encode
    tokens = encode(" check:", add_special_tokens=False)
    template = b"{% for message in messages %}{{ message.content }}{% endfor %} check:"
    gateway.add_adapter("acme", "checker", files={TEMPLATE_FILE: template}, invocation_tokens=tokens)
    [(_, position)] = await placed(gateway, "the harbour check: is open")
    [add] = gateway.engine.adds
    assert position > 0
    assert add.prompt[position : position + len(tokens)] == tokens

    gateway.engine.adds.clear()
    asked = [{"role": "user", "content": "the harbour check: is open"}]
    body = {"model": "checker", "messages": asked, "max_tokens": 1}
    assert (await gateway.http.post("/v1/chat/completions", json=body)).status_code == 200
    [add] = gateway.engine.adds
    assert add.activation == len(add.prompt) - len(tokens), "the template ends with the invocation"


async def test_a_prompt_that_does_not_activate_the_adapter_is_no_cold_load(activated: Gateway) -> None:
    activated.limit("cold_loads_per_minute", 0)
    assert await placed(activated, [7, 8]) == [(None, 0)]
    refused = await activated.http.post("/v1/completions", json={"model": "checker", "prompt": [[7], [*TOKENS]]})
    assert (refused.status_code, refused.json()["error"]["param"]) == (429, "cold_loads_per_minute")


async def test_other_models_are_not_searched(activated: Gateway) -> None:
    activated.add_adapter("acme", "plain")
    for model, digest in (("base", None), ("plain", digest_of("acme/plain@1"))):
        activated.engine.adds.clear()
        body = {"model": model, "prompt": [7, *TOKENS], "max_tokens": 1}
        assert (await activated.http.post("/v1/completions", json=body)).status_code == 200
        assert [(add.digest, add.activation) for add in activated.engine.adds] == [(digest, 0)]
