"""A version's own tokens work in requests to that version, and in no others."""

from __future__ import annotations

from typing import Any

import pytest

from loramux.adapter_store.formats.files.file_names import TEMPLATE_FILE, VOCABULARY_FILE
from loramux.adapter_store.formats.version_files.added_vocabulary import (
    AddedToken,
    AddedVocabulary,
    encode_added_vocabulary,
)
from tests.platform.gateways import Gateway
from tests.platform.scripted_engine import Script
from tests.platform.tool_base import TEMPLATE

pytestmark = pytest.mark.anyio

BASE_SIZE = 1024
CALL = '{"name": "get_weather", "arguments": {}}'


def files_of(gateway: Gateway, content: str, further: int = 2, template: str = "") -> dict[str, bytes]:
    first = gateway.services.prompts.tokenizer.num_tokens
    token = AddedToken(first, content, special=False, lstrip=False, rstrip=False, single_word=False, normalized=False)
    special = AddedToken(first + 1, f"<|{content}|>", True, False, False, False, False)
    files = {VOCABULARY_FILE: encode_added_vocabulary(AddedVocabulary(BASE_SIZE + further, (token, special)))}
    return {**files, TEMPLATE_FILE: template.encode()} if template else files


async def post(gateway: Gateway, path: str, **body: Any) -> dict[str, Any]:
    response = await gateway.http.post(path, json=body)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


async def test_prompts_and_answers_use_the_versions_tokens(gateway: Gateway) -> None:
    gateway.add_adapter("acme", "support", files=files_of(gateway, "[緑]"))
    gateway.add_adapter("acme", "other", files=files_of(gateway, "[rot]", further=5))
    first = gateway.services.prompts.tokenizer.num_tokens
    gateway.engine.script = lambda add: Script(token_ids=(first, first + 1))
    answers = {
        model: await post(gateway, "/v1/completions", model=model, prompt="[緑] or [rot]", logprobs=0, max_tokens=2)
        for model in ("support", "other", "base")
    }
    adds = gateway.engine.adds
    assert [add.vocab_size for add in adds] == [BASE_SIZE + 2, BASE_SIZE + 5, None]
    assert [add.prompt.count(first) for add in adds] == [1, 1, 0]
    assert adds[0].prompt != adds[1].prompt
    texts = {model: answer["choices"][0]["text"] for model, answer in answers.items()}
    # The special token is not shown.
    assert texts == {"support": "[緑]", "other": "[rot]", "base": ""}
    spelled = answers["support"]["choices"][0]["logprobs"]["tokens"]
    assert spelled == ["[緑]", "<|[緑]|>"]


async def test_a_stop_string_that_is_a_token_ends_the_answer(gateway: Gateway) -> None:
    gateway.add_adapter("acme", "support", files=files_of(gateway, "[stop]"))
    first = gateway.services.prompts.tokenizer.num_tokens
    gateway.engine.script = lambda add: Script(token_ids=(300, first, 301))
    answer = await post(gateway, "/v1/completions", model="support", prompt="x", stop=["[stop]"], max_tokens=9)
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert answer["usage"]["completion_tokens"] == 2


async def test_fields_with_token_ids_are_checked_against_the_versions_vocabulary(gateway: Gateway) -> None:
    gateway.add_adapter("acme", "support", files=files_of(gateway, "[a]"))
    last = BASE_SIZE + 1
    fields: dict[str, Any] = {
        "prompt": [5, last],
        "logit_bias": {str(last): 5},
        "stop_token_ids": [last],
        "allowed_token_ids": [1, last],
    }
    await post(gateway, "/v1/completions", model="support", max_tokens=1, **fields)
    assert gateway.engine.adds[-1].sampling.logit_bias == ((last, 5.0),)
    for model, beyond in (("base", last), ("support", last + 1)):
        for name, value in {
            "prompt": [5, beyond],
            "logit_bias": {str(beyond): 5},
            "stop_token_ids": [beyond],
            "allowed_token_ids": [1, beyond],
        }.items():
            body = {"model": model, "prompt": "x", "max_tokens": 1, name: value}
            refused = await gateway.http.post("/v1/completions", json=body)
            assert (refused.status_code, refused.json()["error"]["param"]) == (400, name)


async def test_tokenize_and_detokenize_know_the_tokens(gateway: Gateway) -> None:
    gateway.add_adapter("acme", "support", files=files_of(gateway, "[緑]"))
    first = gateway.services.prompts.tokenizer.num_tokens
    found = await post(gateway, "/tokenize", model="support", prompt="a [緑]", return_token_strs=True)
    assert found["tokens"][-1] == first
    assert found["token_strs"][-1] == "[緑]"
    text = await post(gateway, "/detokenize", model="support", tokens=[first, first + 1])
    assert text["prompt"] == "[緑]<|[緑]|>"
    refused = await gateway.http.post("/detokenize", json={"tokens": [first]})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "tokens")
    assert first not in (await post(gateway, "/tokenize", prompt="a [緑]"))["tokens"]


async def test_a_versions_template_writes_its_tokens(gateway: Gateway) -> None:
    template = "{% for message in messages %}<|[turn]|>{{ message.content }}{% endfor %}"
    gateway.add_adapter("acme", "support", files=files_of(gateway, "[turn]", template=template))
    messages = [{"role": "user", "content": "Hello"}]
    found = await post(gateway, "/tokenize", model="support", messages=messages)
    assert found["tokens"][0] == gateway.services.prompts.tokenizer.num_tokens + 1
    await post(gateway, "/v1/chat/completions", model="support", messages=messages, max_tokens=1)
    assert list(gateway.engine.adds[-1].prompt) == found["tokens"]


async def test_a_forced_call_names_the_versions_markers(gateway: Gateway) -> None:
    first = gateway.services.prompts.tokenizer.num_tokens
    tokens = tuple(
        AddedToken(first + index, content, True, False, False, False, False)
        for index, content in enumerate(("<tool_call>", "</tool_call>"))
    )
    vocabulary = encode_added_vocabulary(AddedVocabulary(BASE_SIZE + 2, tokens))
    template = {TEMPLATE_FILE: TEMPLATE.encode()}
    gateway.add_adapter("acme", "caller", files={**template, VOCABULARY_FILE: vocabulary})
    gateway.add_adapter("acme", "plain", files=template)
    gateway.engine.script = lambda add: Script(
        token_ids=(first, *gateway.services.prompts.tokenizer.encode(CALL)[1:], first + 1)
    )
    body = {
        "messages": [{"role": "user", "content": "Hello"}],
        "tools": [{"type": "function", "function": {"name": "get_weather"}}],
        "tool_choice": "required",
    }
    answer = await post(gateway, "/v1/chat/completions", model="caller", **body)
    assert answer["choices"][0]["message"]["tool_calls"][0]["function"] == {"name": "get_weather", "arguments": "{}"}
    assert f"<[{first}]>" in gateway.engine.adds[-1].grammar
    await post(gateway, "/v1/chat/completions", model="plain", **body)
    assert f"<[{first}]>" not in gateway.engine.adds[-1].grammar
