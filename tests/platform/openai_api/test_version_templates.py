from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from tokenizers import Tokenizer

from loramux.adapter_store.formats.files.file_names import PARSERS_FILE, TEMPLATE_FILE
from loramux.engine.chat_templates.chat_template import ChatTemplate
from loramux.migrations.database import Database
from loramux.platform.tokenizer.model_tokenizer import ModelTokenizer
from tests.demo_base import DEMO_BASE
from tests.engine.chat_templates.templates import BY_ROLE, EITHER, FIRST_PART, PARTS
from tests.platform.gateways import Gateway, open_gateway
from tests.platform.scripted_engine import Script
from tests.platform.tool_base import TEMPLATE

pytestmark = pytest.mark.anyio

ASKED = [{"role": "user", "content": "Hello"}]


def template(house: str) -> dict[str, bytes]:
    source = house + ":{% for message in messages %} {{ message.role }} {{ message.content }}{% endfor %} >"
    return {TEMPLATE_FILE: source.encode()}


async def prompt_of(gateway: Gateway, model: str, secret: str, **fields: Any) -> str:
    headers = {"authorization": f"Bearer {secret}"}
    body = {"model": model, "messages": ASKED, "max_tokens": 1, **fields}
    response = await gateway.http.post("/v1/chat/completions", json=body, headers=headers)
    assert response.status_code == 200, response.text
    request_id = response.headers["x-request-id"]
    [add] = [add for add in gateway.engine.adds if add.sequence_id.startswith(request_id)]
    tokenizer = gateway.services.prompts.tokenizer
    return b"".join(tokenizer.token_bytes(token) for token in add.prompt).decode()


async def test_each_prompt_is_its_own_templates(gateway: Gateway) -> None:
    gateway.add_adapter("acme", "support", files=template("ACME"))
    gateway.add_adapter("acme", "plain")
    gateway.add_adapter("bravo", "support", files=template("BRAVO"))
    bravo = gateway.key_of("bravo")
    wanted = [
        ("support", gateway.key, "ACME: user Hello >"),
        ("support", bravo, "BRAVO: user Hello >"),
        ("plain", gateway.key, "<|bos|><|user|>Hello<|end|><|assistant|>"),
        ("base", bravo, "<|bos|><|user|>Hello<|end|><|assistant|>"),
    ] * 3
    prompts = await asyncio.gather(*(prompt_of(gateway, model, key) for model, key, _ in wanted))
    assert prompts == [prompt for _, _, prompt in wanted]
    timed = gateway.services.metrics.registry.get_sample_value("loramux_adapter_template_seconds_count")
    assert timed == 6, "the base's template is not timed"


async def test_a_versions_template_decides_whether_tools_are_supported(gateway: Gateway) -> None:
    gateway.add_adapter("acme", "caller", files={TEMPLATE_FILE: TEMPLATE.encode()})
    tools = [{"type": "function", "function": {"name": "get_weather"}}]
    call = '<tool_call>{"name": "get_weather", "arguments": {}}</tool_call>'
    token_ids = gateway.services.prompts.tokenizer.encode(call)[1:]
    gateway.engine.script = lambda add: Script(token_ids=token_ids)
    body = {"messages": ASKED, "tools": tools}
    answered = await gateway.http.post("/v1/chat/completions", json={"model": "caller", **body})
    [choice] = answered.json()["choices"]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["tool_calls"][0]["function"] == {"name": "get_weather", "arguments": "{}"}
    refused = await gateway.http.post("/v1/chat/completions", json={"model": "base", **body})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "tools")


async def test_a_version_decides_how_its_calls_are_read(gateway: Gateway) -> None:
    shown = {TEMPLATE_FILE: TEMPLATE.encode()}
    gateway.add_adapter("acme", "pythonic", files={**shown, PARSERS_FILE: b'{"tool_call_parser": "pythonic"}'})
    gateway.add_adapter("acme", "plain", files={**shown, PARSERS_FILE: b'{"tool_call_parser": "off"}'})
    call = "[get_weather()]"
    token_ids = gateway.services.prompts.tokenizer.encode(call)[1:]
    gateway.engine.script = lambda add: Script(token_ids=token_ids)
    body = {"messages": ASKED, "tools": [{"type": "function", "function": {"name": "get_weather"}}]}
    read = await gateway.http.post("/v1/chat/completions", json={"model": "pythonic", **body})
    [choice] = read.json()["choices"]
    assert choice["message"]["tool_calls"][0]["function"] == {"name": "get_weather", "arguments": "{}"}
    unread = await gateway.http.post("/v1/chat/completions", json={"model": "plain", **body})
    assert unread.json()["choices"][0]["message"]["content"] == call
    refused = await gateway.http.post(
        "/v1/chat/completions", json={"model": "plain", **body, "tool_choice": "required"}
    )
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "tool_choice")


async def test_a_template_that_rejects_a_conversation_names_the_messages(gateway: Gateway) -> None:
    source = "{% if messages | length > 1 %}{{ raise_exception('one at a time') }}{% endif %}{{ messages[0].content }}"
    gateway.add_adapter("acme", "support", files={TEMPLATE_FILE: source.encode()})
    body = {"model": "support", "messages": ASKED * 2}
    response = await gateway.http.post("/v1/chat/completions", json=body)
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, "messages")
    assert "one at a time" in error["message"]


async def test_tokenize_uses_the_versions_template(gateway: Gateway) -> None:
    gateway.add_adapter("acme", "support", files=template("ACME"))
    response = await gateway.http.post("/tokenize", json={"model": "support", "messages": ASKED})
    text = gateway.services.prompts.tokenizer.decode(response.json()["tokens"])
    assert text == "ACME: user Hello >"


def parts(*texts: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": text} for text in texts]


CONTENTS: dict[str, tuple[str, str, str]] = {
    "strings": (
        "{% for message in messages %}<{{ message.role }}>{{ message.content }}</>{% endfor %}",
        "<system>Be brief.</><user>Hello</><assistant></><user>One\nTwo</>",
        "<user>One\nTwo</><assistant>Thr",
    ),
    "parts": (
        PARTS,
        "<system>Be brief.</><user>Hello</><assistant></><user>OneTwo</><assistant>",
        "<user>OneTwo</><assistant>Thr",
    ),
    "first part": (
        FIRST_PART,
        "<system>Be brief.</><user>Hello</><assistant></><user>One\nTwo</>",
        "<user>One\nTwo</><assistant>Thr",
    ),
    "both": (
        EITHER,
        "<system>Be brief.</><user>Hello</><assistant></><user>[One][Two]</>",
        "<user>[One][Two]</><assistant>Thr",
    ),
    "by role": (
        BY_ROLE,
        "<system>Be brief.</><user>Hello</><assistant></><user>OneTwo</>",
        "<user>OneTwo</><assistant>Thr",
    ),
}


@pytest.mark.parametrize("is_base", [False, True], ids=["adapter", "base"])
@pytest.mark.parametrize(("source", "whole", "continued"), CONTENTS.values(), ids=CONTENTS.keys())
async def test_a_template_gets_contents_in_the_form_that_it_reads(
    accounts: Database, threads: ThreadPoolExecutor, source: str, whole: str, continued: str, is_base: bool
) -> None:
    raw = Tokenizer.from_file(str(DEMO_BASE / "tokenizer.json"))
    base = ChatTemplate({"default": source if is_base else "{{ messages[0].content }}"}, {})
    asked = {"role": "user", "content": parts("One", "Two")}
    messages = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": "Hello"},
        {"role": "assistant", "content": []},
        asked,
    ]
    begun = [asked, {"role": "assistant", "content": "Thr"}]
    async with open_gateway(accounts, ModelTokenizer(raw, base), threads) as gateway:
        model = "base" if is_base else "support"
        if not is_base:
            gateway.add_adapter("acme", model, files={TEMPLATE_FILE: source.encode()})
        assert await prompt_of(gateway, model, gateway.key, messages=messages) == whole
        fields = {"messages": begun, "continue_final_message": True, "add_generation_prompt": False}
        assert await prompt_of(gateway, model, gateway.key, **fields) == continued
