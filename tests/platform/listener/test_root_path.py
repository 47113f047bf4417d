from __future__ import annotations

from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from loramux.migrations.database import Database
from loramux.platform.requests.services import GatewaySettings
from loramux.platform.tokenizer.model_tokenizer import ModelTokenizer
from tests.platform.gateways import Gateway, open_gateway

pytestmark = pytest.mark.anyio

BODY = {"model": "base", "prompt": "Hello", "max_tokens": 1}


@pytest.fixture
async def below_llm(
    accounts: Database, tokenizer: ModelTokenizer, threads: ThreadPoolExecutor, anyio_backend: str
) -> AsyncIterator[Gateway]:
    async with open_gateway(accounts, tokenizer, threads, GatewaySettings(root_path="/a/llm")) as gateway:
        yield gateway


@pytest.mark.parametrize("prefix", ["", "/a/llm"])
async def test_each_call_is_answered_with_and_without_the_prefix(below_llm: Gateway, prefix: str) -> None:
    http = below_llm.http
    assert (await http.post(f"{prefix}/v1/completions", json=BODY)).status_code == 200
    assert (await http.get(f"{prefix}/v1/models/base")).json()["id"] == "base"
    assert (await http.get(f"{prefix}/health/live")).status_code == 200
    refused = await http.post(f"{prefix}/v1/completions", json=BODY, headers={"authorization": "Bearer wrong"})
    assert refused.status_code == 401
    counted = 'loramux_requests_total{endpoint="completions",status="200"} 1.0'
    assert counted in below_llm.services.metrics.render().decode()


@pytest.mark.parametrize(
    "path", ["/a/llmv1/models", "/a/llm", "/a/v1/models", "/a/llm/a/llm/v1/models", "/A/LLM/v1/models"]
)
async def test_other_paths_are_unknown(below_llm: Gateway, path: str) -> None:
    assert (await below_llm.http.get(path)).status_code == 404


async def test_prefix_is_unknown_without_the_setting(gateway: Gateway) -> None:
    assert (await gateway.http.get("/a/llm/v1/models")).status_code == 404


@pytest.mark.parametrize("path", ["/a/llm/chat/completions", "/a/llm/v1/v1/chat/completions"])
async def test_a_wrong_base_url_is_told_the_path_below_the_prefix(below_llm: Gateway, path: str) -> None:
    error = (await below_llm.http.post(path)).json()["error"]
    assert error["message"].endswith("so that it calls /a/llm/v1/chat/completions")
