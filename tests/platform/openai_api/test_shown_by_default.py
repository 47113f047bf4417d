"""What a server shows in each answer because its operator says so."""

from __future__ import annotations

from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from loramux.migrations.database import Database
from loramux.platform.requests.services import GatewaySettings
from loramux.platform.tokenizer.model_tokenizer import ModelTokenizer
from tests.platform.gateways import Gateway, open_gateway
from tests.platform.openai_api.test_request_fields import BOTH, CHAT, TEXT, answer_of, chunks_of

pytestmark = pytest.mark.anyio


@pytest.fixture
async def telling(
    accounts: Database, tokenizer: ModelTokenizer, threads: ThreadPoolExecutor, anyio_backend: str
) -> AsyncIterator[Gateway]:
    settings = GatewaySettings(forces_usage=True, names_tokens_by_id=True)
    async with open_gateway(accounts, tokenizer, threads, settings) as gateway:
        yield gateway


@BOTH
@pytest.mark.parametrize("options", [None, {}, {"include_usage": False}, {"include_obfuscation": True}])
async def test_each_chunk_reports_the_usage(telling: Gateway, path: str, options: Any) -> None:
    chunks = await chunks_of(telling, path, max_tokens=4, stream_options=options)
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts)
    assert counts[-1] == telling.usage()[0].completion_tokens > 1
    assert chunks[-1]["choices"] == []
    whole = await answer_of(telling, path, max_tokens=4)
    assert whole["usage"]["completion_tokens"] == counts[-1]


def tokens_of(path: str, answer: dict[str, Any]) -> list[str]:
    shown = answer["choices"][0]["logprobs"]
    return [one["token"] for one in shown["content"]] if path == CHAT else shown["tokens"]


@BOTH
async def test_tokens_are_named_by_their_ids_unless_a_request_says_otherwise(telling: Gateway, path: str) -> None:
    fields: dict[str, Any] = {"max_tokens": 3, "logprobs": 1 if path == TEXT else True}
    for given, is_named in ((None, True), (True, True), (False, False)):
        answer = await answer_of(telling, path, return_tokens_as_token_ids=given, **fields)
        assert all(token.startswith("token_id:") is is_named for token in tokens_of(path, answer))
