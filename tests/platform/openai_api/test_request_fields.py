"""vLLM's request fields, on both endpoints: what each changes in the answer, in the engine's work and in the bill."""

from __future__ import annotations

from typing import Any

import pytest

pytestmark = pytest.mark.anyio

TEXT, CHAT = "/v1/completions", "/v1/chat/completions"
BOTH = pytest.mark.parametrize("path", [TEXT, CHAT], ids=["completions", "chat"])


def body_for(path: str, text: str = "Hello", **fields: Any) -> dict[str, Any]:
    asked = {"messages": [{"role": "user", "content": text}]} if path == CHAT else {"prompt": text}
    return {"model": "base", **asked, **fields}


async def answer_of(gateway: Any, path: str, text: str = "Hello", **fields: Any) -> dict[str, Any]:
    response = await gateway.http.post(path, json=body_for(path, text, **fields))
    assert response.status_code == 200, response.text
    return dict(response.json())


def text_of(choice: dict[str, Any]) -> str:
    return str(choice["text"] if "text" in choice else choice["message"]["content"])


@BOTH
async def test_priority_reaches_the_engine_within_the_tenants_share(gateway: Any, path: str) -> None:
    for priority in (-5, None, 2**31 - 1):
        await answer_of(gateway, path, max_tokens=1, priority=priority)
    adds = gateway.engine.adds
    assert [add.priority for add in adds] == [-5, 0, 2**31 - 1]
    assert {add.share_key for add in adds} == {adds[0].share_key}
