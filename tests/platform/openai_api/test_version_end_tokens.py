"""End tokens and special tokens of a version, from its generation_config.json and from its own tokenizer."""

from __future__ import annotations

from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from loramux.adapter_store.formats.files.file_names import GENERATION_FILE, TEMPLATE_FILE, VOCABULARY_FILE
from loramux.adapter_store.formats.version_files.added_vocabulary import (
    AddedToken,
    AddedVocabulary,
    encode_added_vocabulary,
)
from loramux.engine.protocol.messages import Add
from loramux.migrations.database import Database
from loramux.platform.requests.services import GatewaySettings
from loramux.platform.tokenizer.model_tokenizer import ModelTokenizer
from tests.platform.gateways import Gateway, open_gateway

pytestmark = pytest.mark.anyio

BASE_SIZE = 1024


@pytest.fixture(params=[True, False], ids=["auto", "off"])
async def own_gateway(
    request: pytest.FixtureRequest, accounts: Database, tokenizer: ModelTokenizer, threads: ThreadPoolExecutor
) -> AsyncIterator[Gateway]:
    """A gateway that applies the sampling defaults of adapters or not."""
    settings = GatewaySettings(applies_adapter_defaults=request.param)
    async with open_gateway(accounts, tokenizer, threads, settings) as gateway:
        yield gateway


def vocabulary(*tokens: AddedToken, **special_tokens: str) -> dict[str, bytes]:
    size = BASE_SIZE + len(tokens)
    found = AddedVocabulary(size, tokens, special_tokens=tuple(sorted(special_tokens.items())))
    return {VOCABULARY_FILE: encode_added_vocabulary(found)}


async def sent(gateway: Gateway, model: str, path: str = "/v1/completions", **fields: Any) -> Add:
    if path == "/v1/completions":
        fields["prompt"] = "Yes"
    else:
        fields["messages"] = [{"role": "user", "content": "Yes"}]
    response = await gateway.http.post(path, json={"model": model, "max_tokens": 1, **fields})
    assert response.status_code == 200, response.text
    return gateway.engine.adds[-1]


async def test_end_tokens_of_a_version_end_its_answers(own_gateway: Gateway) -> None:
    own_gateway.add_adapter("acme", "support", files={GENERATION_FILE: b'{"eos_token_id": [301, 1]}'})
    for path in ("/v1/completions", "/v1/chat/completions"):
        assert (await sent(own_gateway, "base", path)).sampling.stop_token_ids == ()
        assert (await sent(own_gateway, "support", path)).sampling.stop_token_ids == (301, 1)
    both = await sent(own_gateway, "support", stop_token_ids=[7])
    assert both.sampling.stop_token_ids == (7, 301, 1)
    ignored = await sent(own_gateway, "support", stop_token_ids=[7], ignore_eos=True)
    assert ignored.sampling.stop_token_ids == (7,)


async def test_the_end_token_of_a_versions_tokenizer_ends_its_answers(own_gateway: Gateway) -> None:
    first = own_gateway.services.prompts.tokenizer.num_tokens
    user = own_gateway.services.prompts.tokenizer.token_id("<|user|>")
    added = AddedToken(first, "<|stop|>", True, False, False, False, False)
    own_gateway.add_adapter("acme", "renamed", files=vocabulary(eos_token="<|user|>"))
    own_gateway.add_adapter("acme", "added", files=vocabulary(added, eos_token="<|stop|>"))
    own_gateway.add_adapter("acme", "unknown", files=vocabulary(eos_token="<|nothing|>"))
    assert user is not None
    for model, expected in (("renamed", (user,)), ("added", (first,)), ("unknown", ())):
        assert (await sent(own_gateway, model)).sampling.stop_token_ids == expected


async def test_a_versions_template_writes_its_own_special_tokens(own_gateway: Gateway) -> None:
    source = b"{{ bos_token }}{% for message in messages %}{{ message.content }}{{ eos_token }}{% endfor %}"
    own = vocabulary(eos_token="<|user|>")
    own_gateway.add_adapter("acme", "own", files={TEMPLATE_FILE: source, **own})
    own_gateway.add_adapter("acme", "bases", files={TEMPLATE_FILE: source})
    for model, expected in (("own", "<|bos|>Yes<|user|>"), ("bases", "<|bos|>Yes<|end|>")):
        add = await sent(own_gateway, model, "/v1/chat/completions")
        assert own_gateway.services.prompts.tokenizer.decode(add.prompt, skip_special_tokens=False) == expected


async def test_a_copy_of_the_bases_template_is_not_a_template_of_its_own(own_gateway: Gateway) -> None:
    base = own_gateway.services.prompts.tokenizer.chat_template
    assert base is not None
    source = base.sources["default"]
    assert "bos_token" in source
    own_gateway.add_adapter("acme", "copy", files={TEMPLATE_FILE: f"{source}\r\n".encode()})
    other = {TEMPLATE_FILE: source.encode(), **vocabulary(bos_token="<|user|>")}
    own_gateway.add_adapter("acme", "other", files=other)
    timed = own_gateway.services.metrics.registry.get_sample_value
    expected = (await sent(own_gateway, "base", "/v1/chat/completions")).prompt
    assert (await sent(own_gateway, "copy", "/v1/chat/completions")).prompt == expected
    assert timed("loramux_adapter_template_seconds_count") == 0
    assert (await sent(own_gateway, "other", "/v1/chat/completions")).prompt != expected
