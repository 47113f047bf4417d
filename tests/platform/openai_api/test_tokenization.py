from __future__ import annotations

import json
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from loramux.engine.chat_templates.chat_template import ChatTemplate
from loramux.platform.tokenizer.model_tokenizer import read_tokenizer_info
from tests.platform.tool_base import TEMPLATE

pytestmark = pytest.mark.anyio

MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Häfen 🦊?"}]


async def called(gateway: Any, path: str, body: Any) -> dict[str, Any]:
    response = await gateway.http.post(path, json=body)
    assert response.status_code == 200, response.text
    return dict(response.json())


async def test_tokens_of_a_prompt_are_those_of_a_completion(gateway: Any, tokenizer: Any) -> None:
    text = "One harbour — é 🦊"
    answer = await called(gateway, "/tokenize", {"model": "base", "prompt": text})
    await gateway.openai.completions.create(model="base", prompt=text, max_tokens=1)
    ids = list(gateway.engine.adds[0].prompt)
    assert answer == {"count": len(ids), "max_model_len": 256, "tokens": ids, "token_strs": None}
    bare = await called(gateway, "/tokenize", {"prompt": text, "add_special_tokens": False, "return_token_strs": True})
    assert bare["tokens"] == ids[1:]
    assert len(bare["token_strs"]) == len(ids) - 1
    assert bare["token_strs"][0].startswith("O")


async def test_tokens_of_a_conversation_are_those_of_a_chat(gateway: Any) -> None:
    body = {"model": "base", "messages": MESSAGES, "max_tokens": 3, "temperature": 0.5}
    answer = await called(gateway, "/tokenize", {**body, "return_token_strs": True})
    await gateway.http.post("/v1/chat/completions", json=body)
    assert answer["tokens"] == list(gateway.engine.adds[0].prompt)
    assert len(answer["token_strs"]) == answer["count"]
    marked = await called(gateway, "/tokenize", {"messages": MESSAGES, "add_special_tokens": True})
    assert marked["tokens"] == [gateway.services.prompts.tokenizer.encode("")[0], *answer["tokens"]]
    plain = await called(gateway, "/tokenize", {"messages": MESSAGES, "add_special_tokens": False})
    assert plain["tokens"] == answer["tokens"]
    truncated = await called(gateway, "/tokenize", {"messages": MESSAGES, "truncate_prompt_tokens": 4})
    assert truncated["tokens"] == answer["tokens"][-4:]


async def test_text_of_tokens_is_what_was_tokenised(gateway: Any, tokenizer: Any) -> None:
    text = "One harbour — é 🦊" * 3
    ids = (await called(gateway, "/tokenize", {"model": "base", "prompt": text}))["tokens"]
    begin = tokenizer.token_bytes(ids[0]).decode()
    assert await called(gateway, "/detokenize", {"model": "base", "tokens": ids}) == {"prompt": begin + text}
    assert await called(gateway, "/detokenize", {"tokens": []}) == {"prompt": ""}


async def test_tokenizer_is_described(gateway: Any, tools: Any, demo_base: Path) -> None:
    response = await gateway.http.get("/tokenizer_info")
    info = response.json()
    assert response.status_code == 200, info
    config = json.loads((demo_base / "tokenizer_config.json").read_text())
    assert info.keys() >= config.keys() | {"tokenizer_class"}
    assert (info["eos_token"], info["model_max_length"]) == ("<|end|>", 256)
    assert info["chat_template"] == gateway.services.prompts.tokenizer.chat_template.sources["default"]
    assert (await tools.http.get("/tokenizer_info")).json()["chat_template"] == TEMPLATE


def test_tokens_are_described_by_their_text(tmp_path: Path) -> None:
    config = {
        "bos_token": {"__type": "AddedToken", "content": "<s>", "special": True},
        "additional_special_tokens": ["<a>", {"content": "<b>"}],
        "added_tokens_decoder": {"0": {"content": "<s>"}},
        "model_max_length": 10**30,
        "chat_template": [{"name": "tool_use", "template": "{{ messages }}"}],
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    (tmp_path / "special_tokens_map.json").write_text('{"pad_token": {"content": "<p>"}}')
    assert read_tokenizer_info(tmp_path, ChatTemplate.load(tmp_path)) == {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "pad_token": "<p>",
        "additional_special_tokens": ["<a>", "<b>"],
        "added_tokens_decoder": {"0": "<s>"},
        "model_max_length": 10**30,
        "chat_template": "{{ messages }}",
    }


async def test_description_needs_a_key_that_can_call_models(gateway: Any) -> None:
    viewer = gateway.services.callers.api_keys.create(gateway.tenant.id, "viewer", scopes=["tenant:read"]).secret
    for path, header, status in (
        ("/tokenizer_info", f"Bearer {viewer}", 403),
        ("/tokenizer_info", "", 401),
        ("/version", "", 401),
    ):
        assert (await gateway.http.get(path, headers={"authorization": header})).status_code == status


async def test_version_is_that_of_the_package(gateway: Any) -> None:
    assert (await gateway.http.get("/version")).json() == {"version": version("loramux")}


async def test_nothing_is_charged_or_run(gateway: Any) -> None:
    gateway.limit("requests_per_minute", 0)
    await called(gateway, "/tokenize", {"prompt": "Hello"})
    await called(gateway, "/detokenize", {"tokens": [5]})
    assert gateway.usage() == []
    assert gateway.engine.adds == []


async def test_model_is_resolved_like_that_of_a_completion(gateway: Any) -> None:
    gateway.add_adapter("acme", "support")
    gateway.add_adapter("other", "secret")
    await called(gateway, "/tokenize", {"model": "support", "prompt": "Hello"})
    for path, body in (("/tokenize", {"prompt": "Hello"}), ("/detokenize", {"tokens": [5]})):
        for model in ("other/secret", "nothing"):
            response = await gateway.http.post(path, json={"model": model, **body})
            assert (response.status_code, response.json()["error"]["code"]) == (404, "model_not_found")
        key = gateway.key_of("acme", "adapters")
        response = await gateway.http.post(path, json=body, headers={"authorization": f"Bearer {key}"})
        assert response.status_code == 404, "a key without the base's scope cannot use the base"
        response = await gateway.http.post(path, content=b"{", headers={"authorization": ""})
        assert response.status_code == 401


@pytest.mark.parametrize(
    ("path", "body", "code", "param"),
    [
        ("/tokenize", {"model": "base"}, "missing_required_parameter", "prompt"),
        ("/tokenize", {"prompt": ["a"]}, "invalid_type", "prompt"),
        ("/tokenize", {"prompt": "a", "messages": MESSAGES}, "unknown_parameter", "prompt"),
        ("/tokenize", {"messages": []}, "invalid_value", "messages"),
        ("/tokenize", {"messages": MESSAGES, "use_beam_search": True}, "unsupported_parameter", "use_beam_search"),
        ("/tokenize", {"prompt": "word " * 20_000}, "context_length_exceeded", "prompt"),
        ("/tokenize", {"prompt": "a", "return_token_strs": 1}, "invalid_type", "return_token_strs"),
        ("/tokenize", {"prompt": "a", "model": "x" * 300}, "invalid_value", "model"),
        ("/detokenize", {"model": "base"}, "missing_required_parameter", "tokens"),
        ("/detokenize", {"tokens": [1024]}, "invalid_value", "tokens"),
        ("/detokenize", {"tokens": [-1]}, "invalid_value", "tokens"),
        ("/detokenize", {"tokens": [10**30]}, "invalid_value", "tokens"),
        ("/detokenize", {"tokens": [True]}, "invalid_type", "tokens[0]"),
        ("/detokenize", {"tokens": ["x"] * 10_000}, "invalid_type", "tokens[0]"),
        ("/detokenize", {"tokens": [5] * 257}, "context_length_exceeded", "tokens"),
    ],
    ids=lambda value: repr(value)[:50],
)
async def test_bad_bodies_are_refused_by_field(gateway: Any, path: str, body: Any, code: str, param: str) -> None:
    response = await gateway.http.post(path, json=body)
    error = response.json()["error"]
    assert (response.status_code, error["code"], error["param"]) == (400, code, param)
