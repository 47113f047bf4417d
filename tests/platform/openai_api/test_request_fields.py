from __future__ import annotations

import json
from typing import Any

import pytest

from tests.platform.scripted_engine import Script

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


async def chunks_of(gateway: Any, path: str, text: str = "Hello", **fields: Any) -> list[dict[str, Any]]:
    response = await gateway.http.post(path, json=body_for(path, text, stream=True, **fields))
    *events, last = response.text.removesuffix("\n\n").split("\n\n")
    assert last == "data: [DONE]", response.text
    return [json.loads(event.removeprefix("data: ")) for event in events]


def text_of(choice: dict[str, Any]) -> str:
    return str(choice["text"] if "text" in choice else choice["message"]["content"])


def streamed_text(chunks: list[dict[str, Any]]) -> str:
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    return "".join(choice["text"] if "text" in choice else choice["delta"].get("content", "") for choice in choices)


@BOTH
async def test_priority_reaches_the_engine_within_the_tenants_share(gateway: Any, path: str) -> None:
    for priority in (-5, None, 2**31 - 1):
        await answer_of(gateway, path, max_tokens=1, priority=priority)
    adds = gateway.engine.adds
    assert [add.priority for add in adds] == [-5, 0, 2**31 - 1]
    assert {add.share_key for add in adds} == {adds[0].share_key}


@BOTH
async def test_special_tokens_are_shown_if_asked(gateway: Any, tokenizer: Any, path: str) -> None:
    begin, *ids = tokenizer.encode("Hi 🦊")
    name = tokenizer.token_bytes(begin).decode()
    gateway.engine.script = lambda add: Script(token_ids=(begin, *ids, begin))
    asked = {"max_tokens": 40, "stop": "never"}
    for skips, shown in ((None, "Hi 🦊"), (True, "Hi 🦊"), (False, f"{name}Hi 🦊{name}")):
        whole = await answer_of(gateway, path, skip_special_tokens=skips, **asked)
        assert text_of(whole["choices"][0]) == shown
        chunks = await chunks_of(gateway, path, skip_special_tokens=skips, **asked)
        assert streamed_text(chunks) == shown


@BOTH
async def test_stop_string_is_shown_if_asked(gateway: Any, tokenizer: Any, path: str) -> None:
    ids = tokenizer.encode("First. Second and third.")[1:]
    gateway.engine.script = lambda add: Script(token_ids=ids, tokens_per_output=3)
    asked = {"max_tokens": 60, "stop": [". Sec", ". S"]}
    usages = []
    for is_shown, text in ((None, "First"), (False, "First"), (True, "First. S")):
        whole = await answer_of(gateway, path, include_stop_str_in_output=is_shown, **asked)
        assert (text_of(whole["choices"][0]), whole["choices"][0]["finish_reason"]) == (text, "stop")
        usages.append(whole["usage"]["completion_tokens"])
        chunks = await chunks_of(gateway, path, include_stop_str_in_output=is_shown, **asked)
        assert streamed_text(chunks) == text
    # The bill is the same: the tokens up to the token that completed the string.
    assert len(set(usages)) == 1
    assert {event.completion_tokens for event in gateway.usage()} == set(usages)


@BOTH
@pytest.mark.parametrize(
    ("limit", "max_tokens", "num_kept"),
    [(7, 5, 7), (-1, 56, 200), (-1, 255, 1), (200, 56, 200)],
    ids=["some", "rest of the context", "one", "as many as fit"],
)
async def test_truncated_prompt_keeps_its_last_tokens_and_is_billed_as_such(
    gateway: Any, path: str, limit: int, max_tokens: int, num_kept: int
) -> None:
    text = " ".join(map(str, range(5000)))
    answer = await answer_of(gateway, path, text, truncate_prompt_tokens=limit, max_tokens=max_tokens)
    [add] = gateway.engine.adds
    assert len(add.prompt) == num_kept
    # A conversation ends with tokens from its template.
    assert gateway.services.prompts.tokenizer.decode(add.prompt[-7:]).endswith("4999" if num_kept > 6 else "")
    assert answer["usage"]["prompt_tokens"] == num_kept
    [event] = gateway.usage()
    assert (event.prompt_tokens, event.completion_tokens) == (num_kept, max_tokens)


@BOTH
@pytest.mark.parametrize("side", ["left", "right", None])
async def test_a_prompt_is_truncated_on_the_given_side(gateway: Any, path: str, side: str | None) -> None:
    text = " ".join(map(str, range(100)))
    await answer_of(gateway, path, text, max_tokens=1)
    await answer_of(gateway, path, text, max_tokens=1, truncate_prompt_tokens=9, truncation_side=side)
    whole, cut = (add.prompt for add in gateway.engine.adds)
    assert cut == (whole[:9] if side == "right" else whole[-9:])


async def test_each_prompt_is_truncated_and_echoed_as_truncated(gateway: Any, tokenizer: Any) -> None:
    prompts = ["One harbour in the north", "Two"]
    ids = [tokenizer.encode(prompt) for prompt in prompts]
    for asked in (prompts, [list(one) for one in ids]):
        gateway.engine.adds.clear()
        answer = await gateway.openai.completions.create(
            model="base", prompt=asked, max_tokens=1, echo=True, n=2, extra_body={"truncate_prompt_tokens": 3}
        )
        kept = [one[-3:] for one in ids]
        assert [add.prompt for add in gateway.engine.adds] == [kept[0], kept[0], kept[1], kept[1]]
        for choice in answer.choices:
            assert choice.text.startswith(tokenizer.decode(kept[choice.index // 2]))
        assert "One" not in answer.choices[0].text
        assert answer.usage.prompt_tokens == sum(map(len, kept))


@BOTH
@pytest.mark.parametrize("is_shown", [False, True], ids=["stop hidden", "stop shown"])
async def test_token_ids_are_those_of_the_prompt_and_of_the_bill(
    gateway: Any, tokenizer: Any, path: str, is_shown: bool
) -> None:
    ids, stop = tokenizer.encode("Hi é 🦊")[1:], tokenizer.encode("!")[-1]
    gateway.engine.script = lambda add: Script(token_ids=ids, tokens_per_output=2, stop_token_id=stop)
    asked = {"n": 2, "return_token_ids": True, "include_stop_str_in_output": is_shown, "max_tokens": 40}
    whole = await answer_of(gateway, path, **asked)
    prompt = list(gateway.engine.adds[0].prompt)
    for choice in whole["choices"]:
        assert choice["token_ids"] == [*ids, stop]
        assert choice.get("prompt_token_ids", prompt) == prompt
        assert text_of(choice) == ("Hi é 🦊!" if is_shown else "Hi é 🦊")
    assert ("prompt_token_ids" in whole) == (path == CHAT)
    assert whole["usage"]["completion_tokens"] == 2 * (len(ids) + 1)
    streamed: dict[int, list[int]] = {0: [], 1: []}
    prompts = []
    for chunk in await chunks_of(gateway, path, **asked):
        for choice in chunk["choices"]:
            streamed[choice["index"]] += choice["token_ids"]
            prompts.append(chunk.get("prompt_token_ids") or choice.get("prompt_token_ids"))
    assert streamed == {0: [*ids, stop], 1: [*ids, stop]}
    assert [shown for shown in prompts if shown] == [prompt, prompt]


async def test_token_ids_end_with_the_token_that_completed_a_stop_string(gateway: Any, tokenizer: Any) -> None:
    ids = tokenizer.encode("First. Second and third.")[1:]
    gateway.engine.script = lambda add: Script(token_ids=ids, tokens_per_output=4)
    answer = await answer_of(gateway, TEXT, max_tokens=60, stop=". Sec", return_token_ids=True)
    shown = answer["choices"][0]["token_ids"]
    assert shown == list(ids[: len(shown)])
    assert ". Sec" in tokenizer.decode(shown)
    assert len(shown) == answer["usage"]["completion_tokens"] == gateway.usage()[0].completion_tokens


@BOTH
async def test_no_token_ids_are_shown_unless_asked(gateway: Any, path: str) -> None:
    answer = await answer_of(gateway, path, max_tokens=2, return_token_ids=False)
    assert answer["choices"][0]["token_ids"] is None
    assert answer.get("prompt_token_ids") is answer["choices"][0].get("prompt_token_ids") is None
    assert "token_ids" not in json.dumps(await chunks_of(gateway, path, max_tokens=2))


@BOTH
async def test_every_chunk_reports_the_usage_so_far(gateway: Any, tokenizer: Any, path: str) -> None:
    ids, stop = tokenizer.encode("Hi 🦊")[1:], tokenizer.encode("!")[-1]
    gateway.engine.script = lambda add: Script(token_ids=ids, stop_token_id=stop)
    options = {"include_usage": True, "continuous_usage_stats": True}
    *chunks, last = await chunks_of(gateway, path, n=2, stream_options=options, return_token_ids=True, max_tokens=40)
    num_prompt, num_sent = len(gateway.engine.adds[0].prompt), 0
    for chunk in chunks:
        num_sent += sum(len(choice["token_ids"]) for choice in chunk["choices"])
        usage = chunk["usage"]
        assert usage["prompt_tokens"] == num_prompt
        assert usage["completion_tokens"] == num_sent
        assert usage["total_tokens"] == num_prompt + num_sent
    assert num_sent == 2 * (len(ids) + 1) == last["usage"]["completion_tokens"]
    assert not last["choices"]


async def test_openai_client_reads_the_usage_of_each_chunk(gateway: Any) -> None:
    stream = await gateway.openai.chat.completions.create(
        model="base",
        messages=[{"role": "user", "content": "Hello"}],
        max_tokens=5,
        stream=True,
        stream_options={"include_usage": True, "continuous_usage_stats": True},
    )
    totals = [chunk.usage.total_tokens async for chunk in stream]
    assert totals == sorted(totals)
    assert totals[-1] == len(gateway.engine.adds[0].prompt) + 5
    assert len(set(totals)) > 1


@BOTH
async def test_beam_search_that_is_switched_off_is_accepted(gateway: Any, path: str) -> None:
    await answer_of(gateway, path, use_beam_search=False, length_penalty=1.0, early_stopping=False, max_tokens=1)


@BOTH
async def test_allowed_tokens_reach_every_choice(gateway: Any, path: str) -> None:
    await answer_of(gateway, path, max_tokens=1, n=2, allowed_token_ids=[9, 5, 9])
    assert [add.sampling.allowed_token_ids for add in gateway.engine.adds] == [(5, 9)] * 2


@BOTH
async def test_a_request_without_an_allowed_token_fails_with_400(gateway: Any, path: str) -> None:
    gateway.engine.script = lambda add: Script(token_ids=(), error="no_token_allowed")
    response = await gateway.http.post(path, json=body_for(path, max_tokens=1, allowed_token_ids=[5]))
    assert (response.status_code, response.json()["error"]["code"]) == (400, "no_token_allowed")


@BOTH
async def test_bad_words_reach_the_engine_with_and_without_a_space(gateway: Any, tokenizer: Any, path: str) -> None:
    await answer_of(gateway, path, max_tokens=1, n=2, bad_words=["fox", " fox", "harbour in the north"])
    for add in gateway.engine.adds:
        spelled = [tokenizer.decode(word) for word in add.sampling.bad_words]
        assert spelled == ["fox", " fox", "harbour in the north", " harbour in the north"]


async def test_a_thinking_budget_needs_a_template_with_thinking(gateway: Any) -> None:
    response = await gateway.http.post(CHAT, json=body_for(CHAT, thinking_token_budget=5))
    error = response.json()["error"]
    assert (response.status_code, error["code"], error["param"]) == (
        400,
        "unsupported_parameter",
        "thinking_token_budget",
    )
