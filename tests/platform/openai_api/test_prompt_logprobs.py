from __future__ import annotations

from typing import Any

import openai
import pytest

from tests.platform.scripted_engine import Script

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize("count", [0, 2])
async def test_prompt_logprobs_have_vllms_shape(gateway: Any, tokenizer: Any, count: int) -> None:
    ids = [5, 7, 9]
    answer = await gateway.openai.completions.create(
        model="base", prompt=ids, max_tokens=2, n=2, extra_body={"prompt_logprobs": count}
    )
    for choice in answer.choices:
        first, *rest = choice.prompt_logprobs
        assert first is None
        assert [next(iter(one)) for one in rest] == ["7", "9"]
        assert [len(one) for one in rest] == [max(1, count)] * 2
        spelled = tokenizer.token_bytes(7).decode("utf-8", "replace")
        assert rest[0]["7"] == {"logprob": -0.5, "rank": 1, "decoded_token": spelled}
    # One of the choices scores the prompt for both.
    assert [add.sampling.num_prompt_logprobs for add in gateway.engine.adds] == [count, None]


async def test_chat_reports_its_prompt_once(gateway: Any) -> None:
    answer = await gateway.openai.chat.completions.create(
        model="base", messages=[{"role": "user", "content": "hi"}], max_tokens=2, n=2, extra_body={"prompt_logprobs": 1}
    )
    [add, _] = gateway.engine.adds
    assert answer.prompt_logprobs[0] is None
    assert [int(next(iter(one))) for one in answer.prompt_logprobs[1:]] == list(add.prompt[1:])
    assert len(answer.choices) == 2


@pytest.mark.parametrize("best_of", [None, 3])
async def test_echoed_logprobs_begin_with_the_prompts(gateway: Any, tokenizer: Any, best_of: int | None) -> None:
    prompts = ["one two", "three"]
    ids = tokenizer.encode("x y")[1:]
    gateway.engine.script = lambda add: Script(token_ids=ids)
    answer = await gateway.openai.completions.create(
        model="base", prompt=prompts, max_tokens=9, n=2, best_of=best_of, echo=True, logprobs=1
    )
    assert len(answer.choices) == 4
    for choice in answer.choices:
        shown, prompt = choice.logprobs, prompts[choice.index // 2]
        num_prompt = len(tokenizer.encode(prompt))
        assert choice.text == f"{prompt}x y"
        assert len(shown.tokens) == num_prompt + len(ids)
        assert shown.token_logprobs == [None, *[-0.5] * (num_prompt - 1 + len(ids))]
        assert shown.top_logprobs[0] is None
        assert all(len(one) == 1 for one in shown.top_logprobs[1:])
        assert shown.text_offset == sorted(shown.text_offset)
        assert shown.text_offset[num_prompt] == len(prompt)
        assert shown.tokens[num_prompt:] == [tokenizer.token_bytes(one).decode() for one in ids]


@pytest.mark.parametrize("logprobs", [None, 0, 5])
async def test_max_tokens_0_scores_the_prompt_and_bills_only_it(gateway: Any, logprobs: int | None) -> None:
    answer = await gateway.openai.completions.create(
        model="base", prompt=[5, 7, 9], max_tokens=0, echo=True, logprobs=logprobs
    )
    [choice] = answer.choices
    assert choice.finish_reason == "length"
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (3, 0)
    if logprobs is not None:
        assert choice.logprobs.token_logprobs == [None, -0.5, -0.5]
    [event] = gateway.usage()
    assert (event.prompt_tokens, event.completion_tokens) == (3, 0)


async def test_max_tokens_0_ends_the_same_if_the_first_token_is_an_end_token(gateway: Any) -> None:
    gateway.engine.script = lambda add: Script(token_ids=())
    answer = await gateway.openai.completions.create(model="base", prompt=[5, 7], max_tokens=0, echo=True, logprobs=0)
    assert answer.choices[0].finish_reason == "length"
    assert answer.choices[0].logprobs.token_logprobs == [None, -0.5]
    assert answer.usage.completion_tokens == 0


async def test_a_prompt_of_one_token_has_only_a_null(gateway: Any) -> None:
    answer = await gateway.openai.completions.create(
        model="base", prompt=[5], max_tokens=1, echo=True, logprobs=2, extra_body={"prompt_logprobs": 2}
    )
    assert answer.choices[0].prompt_logprobs == [None]
    assert answer.choices[0].logprobs.token_logprobs == [None, -0.5]


async def test_a_truncated_prompt_is_scored_as_truncated(gateway: Any) -> None:
    answer = await gateway.openai.completions.create(
        model="base",
        prompt=[5, 7, 9, 11],
        max_tokens=1,
        echo=True,
        logprobs=0,
        extra_body={"prompt_logprobs": 0, "truncate_prompt_tokens": 2},
    )
    [choice] = answer.choices
    assert [one and list(one) for one in choice.prompt_logprobs] == [None, ["11"]]
    assert len(choice.logprobs.tokens) == 3


async def test_a_prompt_that_fills_the_context_is_refused(gateway: Any) -> None:
    length = gateway.engine.info.max_model_len
    asked = {"model": "base", "max_tokens": 0, "echo": True, "logprobs": 5}
    with pytest.raises(openai.BadRequestError) as refused:
        await gateway.openai.completions.create(**asked, prompt=[5] * length)
    assert refused.value.code == "context_length_exceeded"
    answer = await gateway.openai.completions.create(**asked, prompt=[5] * (length - 1))
    assert len(answer.choices[0].logprobs.tokens) == length - 1


async def test_scores_are_not_the_first_token(gateway: Any) -> None:
    gateway.engine.script = lambda add: Script(token_ids=(), delay_s=0.05)
    answer = await gateway.openai.completions.create(
        model="base", prompt=[5, 7], max_tokens=3, extra_body={"prompt_logprobs": 0}
    )
    assert answer.choices[0].text == ""
    [event] = gateway.usage()
    assert event.first_token_us is None
