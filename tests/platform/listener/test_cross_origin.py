from __future__ import annotations

from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from loramux.migrations.database import Database
from loramux.platform.requests.services import GatewaySettings
from loramux.platform.tokenizer.model_tokenizer import ModelTokenizer
from tests.platform.gateways import Gateway, open_gateway

pytestmark = pytest.mark.anyio

PAGE = "https://app.example.com"
CHAT = "/v1/chat/completions"
BODY = {"model": "base", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 1}
HEADERS = "authorization, content-type, x-stainless-lang"


@pytest.fixture(params=[(PAGE, "http://localhost:3000"), ("*",)], ids=["listed", "all"])
async def open_to_pages(
    request: Any, accounts: Database, tokenizer: ModelTokenizer, threads: ThreadPoolExecutor, anyio_backend: str
) -> AsyncIterator[Gateway]:
    settings = GatewaySettings(cors_origins=request.param)
    async with open_gateway(accounts, tokenizer, threads, settings) as gateway:
        yield gateway


def allowed(response: httpx.Response) -> str | None:
    return response.headers.get("access-control-allow-origin")


async def preflight(gateway: Gateway, method: str = "POST", origin: str = PAGE) -> httpx.Response:
    asked = {"origin": origin, "access-control-request-method": method, "access-control-request-headers": HEADERS}
    return await gateway.http.options(CHAT, headers={**asked, "authorization": ""})


async def test_page_asks_first_without_a_key_and_then_calls(open_to_pages: Gateway) -> None:
    asked = await preflight(open_to_pages)
    assert (asked.status_code, allowed(asked) in (PAGE, "*")) == (200, True)
    assert asked.headers["access-control-allow-headers"] == HEADERS
    assert {"POST", "GET"} <= set(asked.headers["access-control-allow-methods"].split(", "))
    for stream in (False, True):
        answer = await open_to_pages.http.post(CHAT, json={**BODY, "stream": stream}, headers={"origin": PAGE})
        assert (answer.status_code, allowed(answer)) == (200, allowed(asked))
        assert answer.headers["access-control-expose-headers"] == "*"
        assert "access-control-allow-credentials" not in answer.headers


async def test_page_can_read_errors(open_to_pages: Gateway, monkeypatch: pytest.MonkeyPatch) -> None:
    answer = await open_to_pages.http.post(CHAT, json=BODY, headers={"origin": PAGE, "authorization": ""})
    assert (answer.status_code, allowed(answer) in (PAGE, "*")) == (401, True)

    def fail(*_: Any) -> Any:
        raise ValueError("a bug")

    monkeypatch.setattr("loramux.platform.requests.request_life.make_plan", fail)
    answer = await open_to_pages.http.post(CHAT, json=BODY, headers={"origin": PAGE})
    assert (answer.status_code, allowed(answer) in (PAGE, "*")) == (500, True)


@pytest.mark.parametrize("origin", ["https://evil.example", "https://app.example.com.evil.example", "null", "*"])
async def test_other_origins_are_refused(open_to_pages: Gateway, origin: str) -> None:
    settings = open_to_pages.services.settings
    asked = await preflight(open_to_pages, origin=origin)
    answer = await open_to_pages.http.get("/v1/models", headers={"origin": origin})
    if settings.cors_origins == ("*",):
        assert (asked.status_code, allowed(asked), allowed(answer)) == (200, "*", "*")
        return
    assert (asked.status_code, asked.json()["error"]["code"]) == (400, "origin_not_allowed")
    assert (allowed(asked), allowed(answer), answer.status_code) == (None, None, 200)
    assert "Origin" in answer.headers["vary"]
    assert "Origin" in asked.headers["vary"]


async def test_other_methods_are_refused(open_to_pages: Gateway) -> None:
    asked = await preflight(open_to_pages, "PUT")
    assert (asked.status_code, asked.json()["error"]["code"]) == (400, "origin_not_allowed")


async def test_no_page_of_another_origin_can_read_answers_by_default(gateway: Any) -> None:
    asked = await preflight(gateway)
    assert (asked.status_code, allowed(asked)) == (405, None)
    answer = await gateway.http.post(CHAT, json=BODY, headers={"origin": PAGE})
    assert (answer.status_code, allowed(answer), "vary" in answer.headers) == (200, None, False)
