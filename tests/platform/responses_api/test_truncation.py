from __future__ import annotations

from typing import Any

import pytest

from loramux.platform.requests.chat_preparation import prepare_chat
from loramux.platform.requests.endpoint import Prepared
from loramux.platform.responses_api import truncation
from tests.platform.gateways import Gateway
from tests.platform.openai_api.test_bad_input import refused
from tests.platform.openai_api.test_tools import prompt_of
from tests.platform.responses_api.transcripts import RESPONSES

pytestmark = pytest.mark.anyio

LONG = "word " * 60


def said(role: str, text: str) -> dict[str, Any]:
    return {"role": role, "content": text}


def body(given: list[dict[str, Any]], **fields: Any) -> dict[str, Any]:
    fields = {"truncation": "auto", "max_output_tokens": 8, **fields}
    return {"model": "base", "instructions": "Be brief", "input": given, **fields}


async def test_conversation_that_fits_is_whole(tools: Gateway) -> None:
    response = await tools.http.post(RESPONSES, json=body([said("user", "first"), said("user", "last")]))
    assert response.json()["truncation"] == "auto"
    assert "first" in prompt_of(tools)


async def test_oldest_messages_are_dropped(tools: Gateway) -> None:
    given = [said("user" if index % 2 == 0 else "assistant", f"<{index}> {LONG}") for index in range(31)]
    response = await tools.http.post(RESPONSES, json=body(given))
    assert response.status_code == 200, response.text
    prompt = prompt_of(tools)
    kept = [index for index in range(31) if f"<{index}>" in prompt]
    assert kept == list(range(kept[0], 31))
    assert kept[0] % 2 == 0
    assert "Be brief" in prompt
    # Two more messages would not fit.
    [one] = tools.engine.adds
    assert 1024 - 8 - 2 * (len(one.prompt) / len(kept)) < len(one.prompt) <= 1024 - 8


async def test_output_is_never_separated_from_its_call(tools: Gateway) -> None:
    call = {"type": "function_call", "call_id": "c1", "name": "look", "arguments": "{}"}
    result = {"type": "function_call_output", "call_id": "c1", "output": LONG}
    given = [said("user", "first"), *[call, result] * 12]
    response = await tools.http.post(RESPONSES, json=body(given))
    assert response.status_code == 200, response.text
    prompt = prompt_of(tools)
    assert "first" not in prompt
    assert prompt.index("<tool_call>") < prompt.index("<|tool|>")


@pytest.mark.parametrize("truncation", ["auto", "disabled"])
async def test_message_that_never_fits_is_refused(tools: Gateway, truncation: str) -> None:
    given = [said("user", "first"), said("user", LONG * 30)]
    sent = body(given, truncation=truncation)
    await refused(tools, RESPONSES, 400, "context_length_exceeded", "input", json=sent)


async def test_refusal_renders_a_long_conversation_few_times(tools: Gateway, monkeypatch: pytest.MonkeyPatch) -> None:
    num_prepared = 0

    async def counted(*arguments: Any) -> Prepared:
        nonlocal num_prepared
        num_prepared += 1
        return await prepare_chat(*arguments)

    monkeypatch.setattr(truncation, "prepare_chat", counted)
    given = [*[said("user", "short"), said("assistant", "answer")] * 500, said("user", LONG * 30)]
    await refused(tools, RESPONSES, 400, "context_length_exceeded", "input", json=body(given))
    # The whole conversation, the shortest from a user's message and from any message, and the refusal.
    assert num_prepared == 4
