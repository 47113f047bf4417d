from __future__ import annotations

import json
from typing import Any

import pytest

from tests.platform.scripted_engine import Script

pytestmark = pytest.mark.anyio

ASKED = [{"role": "user", "content": "Hello"}]


async def test_prompt_uses_the_models_own_template(gateway: Any, tokenizer: Any) -> None:
    messages = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]},
        {"role": "assistant", "content": "three", "refusal": None, "annotations": [], "tool_calls": None},
        {"role": "user", "content": "four", "name": "ann"},
    ]
    await gateway.openai.chat.completions.create(model="base", messages=messages, max_tokens=1)
    text = (
        "<|bos|><|system|>Be brief.<|end|><|user|>one\ntwo<|end|><|assistant|>three<|end|><|user|>four<|end|>"
        "<|assistant|>"
    )
    expected = tokenizer.encode(text)
    # The plain encoding adds its own beginning-of-sequence token.
    assert gateway.engine.adds[0].prompt == expected[1:]


async def test_body_matches_openais_exactly(gateway: Any, tokenizer: Any) -> None:
    gateway.engine.script = lambda add: Script(token_ids=tokenizer.encode("Hi")[1:])
    response = await gateway.http.post("/v1/chat/completions", json={"model": "base", "messages": ASKED})
    body = response.json()
    num_prompt = len(gateway.engine.adds[0].prompt)
    num_answer = len(tokenizer.encode("Hi"))
    assert body == {
        "id": response.headers["x-request-id"].replace("req_", "chatcmpl-"),
        "object": "chat.completion",
        "created": body["created"],
        "model": "base",
        "service_tier": "default",
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "Hi", "refusal": None},
                "logprobs": None,
                "finish_reason": "stop",
                "stop_reason": None,
                "token_ids": None,
            }
        ],
        "prompt_token_ids": None,
        "prompt_logprobs": None,
        "usage": {
            "prompt_tokens": num_prompt,
            "completion_tokens": num_answer,
            "total_tokens": num_prompt + num_answer,
            "prompt_tokens_details": {"cached_tokens": 0},
        },
    }
    # Without a limit the answer can use the rest of the context.
    assert gateway.engine.adds[0].max_tokens == 256 - num_prompt


async def test_stream_matches_openais_exactly(gateway: Any, tokenizer: Any) -> None:
    ids = tokenizer.encode("Ab")[1:]
    gateway.engine.script = lambda add: Script(token_ids=ids)
    response = await gateway.http.post(
        "/v1/chat/completions", json={"model": "base", "messages": ASKED, "max_tokens": len(ids), "stream": True}
    )
    *events, last = response.text.removesuffix("\n\n").split("\n\n")
    assert last == "data: [DONE]"
    chunks = [json.loads(event.removeprefix("data: ")) for event in events]
    head = {
        "id": response.headers["x-request-id"].replace("req_", "chatcmpl-"),
        "object": "chat.completion.chunk",
        "created": chunks[0]["created"],
        "model": "base",
        "service_tier": "default",
    }
    deltas = [
        ({"role": "assistant", "content": ""}, None),
        *(({"content": tokenizer.decode([token])}, None) for token in ids),
        ({}, "length"),
    ]
    expected = [
        {**head, "choices": [{"index": 0, "delta": delta, "logprobs": None, "finish_reason": reason}]}
        for delta, reason in deltas
    ]
    expected[-1]["choices"][0]["stop_reason"] = None
    assert chunks == expected


async def test_openai_client_parses_the_stream(gateway: Any, tokenizer: Any) -> None:
    gateway.engine.script = lambda add: Script(token_ids=tokenizer.encode("Good day 🦊!")[1:])
    async with gateway.openai.chat.completions.stream(
        model="base", messages=ASKED, stream_options={"include_usage": True}
    ) as stream:
        final = await stream.get_final_completion()
    assert final.choices[0].message.content == "Good day 🦊!"
    assert final.usage.completion_tokens == len(tokenizer.encode("Good day 🦊!"))
    again = await gateway.openai.chat.completions.create(
        model="base", messages=[*ASKED, final.choices[0].message.model_dump(exclude={"parsed"}), *ASKED], max_tokens=1
    )
    assert again.choices[0].finish_reason == "length"


async def test_choices_of_one_prompt_are_streamed_separately(gateway: Any, tokenizer: Any) -> None:
    ids = tokenizer.encode("Xylophones quiver.")[1:]
    gateway.engine.script = lambda add: Script(token_ids=ids[: 1 + int(add.sequence_id[-1])])
    stream = await gateway.openai.chat.completions.create(
        model="base", messages=ASKED, n=3, stream=True, stream_options={"include_usage": True}
    )
    texts, roles, reasons = ["", "", ""], [0, 0, 0], [0, 0, 0]
    async for chunk in stream:
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            roles[choice.index] += choice.delta.role == "assistant"
            reasons[choice.index] += choice.finish_reason == "stop"
    assert texts == [tokenizer.decode(ids[:n]) for n in (1, 2, 3)]
    assert roles == reasons == [1, 1, 1]
    assert chunk.usage.prompt_tokens == len(gateway.engine.adds[0].prompt)
    assert chunk.usage.completion_tokens == 2 + 3 + 4


async def test_logprob_bytes_join_to_the_text(gateway: Any, tokenizer: Any) -> None:
    ids = tokenizer.encode("é 🦊")[1:]
    gateway.engine.script = lambda add: Script(token_ids=ids)
    asked = {"model": "base", "messages": ASKED, "max_tokens": len(ids), "logprobs": True, "top_logprobs": 2}
    answer = await gateway.openai.chat.completions.create(**asked)
    content = answer.choices[0].logprobs.content
    assert b"".join(bytes(entry.bytes) for entry in content).decode() == "é 🦊" == answer.choices[0].message.content
    assert [len(entry.top_logprobs) for entry in content] == [2] * len(ids)
    assert content[0].top_logprobs[0].bytes == content[0].bytes
    stream = await gateway.openai.chat.completions.create(**asked, stream=True)
    streamed = [
        entry
        async for chunk in stream
        for choice in chunk.choices
        if choice.logprobs
        for entry in choice.logprobs.content
    ]
    assert streamed == content


async def test_fields_without_effect_are_accepted(gateway: Any) -> None:
    answer = await gateway.openai.chat.completions.create(
        model="base",
        messages=ASKED,
        max_completion_tokens=2,
        user="u",
        metadata={"a": "b"},
        store=False,
        service_tier="auto",
        safety_identifier="s",
        prompt_cache_key="k",
        parallel_tool_calls=True,
        tools=[],
        tool_choice="none",
        response_format={"type": "text"},
        presence_penalty=0,
        frequency_penalty=0.0,
        logit_bias={},
        temperature=None,
        stop=None,
        modalities=["text"],
    )
    assert answer.usage.completion_tokens == 2
