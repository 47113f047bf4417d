from __future__ import annotations

import json
from typing import Any

import pytest

from loramux.engine.protocol.messages import StatsRequest
from loramux.engine.scheduling.request_limits import sampling_problem
from tests.platform.scripted_engine import Script

pytestmark = pytest.mark.anyio

MAIN = "The harbour of Port Vale lies quiet."


async def test_completion_returns_the_engines_tokens(gateway: Any) -> None:
    answer = await gateway.openai.completions.create(model="base", prompt=MAIN, max_tokens=40)
    assert answer.choices[0].text.startswith(MAIN)
    assert answer.choices[0].finish_reason == "length"
    assert answer.model == "base"
    assert answer.usage.completion_tokens == 40
    [event] = gateway.usage()
    assert (event.prompt_tokens, event.completion_tokens) == (answer.usage.prompt_tokens, 40)
    assert (event.status, event.endpoint, event.model, event.tenant) == ("completed", "completions", "base", "acme")
    assert event.first_token_us is not None


async def test_body_matches_openais_exactly(gateway: Any, tokenizer: Any) -> None:
    gateway.engine.script = lambda add: Script(token_ids=tokenizer.encode("Hi")[1:], cached_tokens=1)
    response = await gateway.http.post("/v1/completions", json={"model": "base", "prompt": "Yes", "max_tokens": 30})
    body = response.json()
    request_id = response.headers["x-request-id"]
    assert request_id.startswith("req_")
    assert body == {
        "id": request_id.replace("req_", "cmpl-"),
        "object": "text_completion",
        "created": body["created"],
        "model": "base",
        "service_tier": "default",
        "choices": [
            {
                "text": "Hi",
                "index": 0,
                "logprobs": None,
                "finish_reason": "stop",
                "stop_reason": None,
                "token_ids": None,
                "prompt_token_ids": None,
                "prompt_logprobs": None,
            }
        ],
        "usage": {
            "prompt_tokens": len(tokenizer.encode("Yes")),
            "completion_tokens": len(tokenizer.encode("Hi")[1:]) + 1,
            "total_tokens": len(tokenizer.encode("Yes")) + len(tokenizer.encode("Hi")[1:]) + 1,
            "prompt_tokens_details": {"cached_tokens": 1},
        },
    }
    assert "x-loramux-adapter" not in response.headers
    assert response.headers["x-loramux-resolved-model"] == "base"
    assert not any(name.startswith("x-ratelimit") for name in response.headers)


async def test_base_whose_name_no_header_can_contain_answers(gateway: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    name = "模型"
    monkeypatch.setattr(gateway.services.callers.resolver, "served_name", name)
    response = await gateway.http.post("/v1/completions", json={"model": name, "prompt": "Yes", "max_tokens": 1})
    assert response.status_code == 200
    assert "x-loramux-resolved-model" not in response.headers


async def test_stream_matches_openais_exactly(gateway: Any, tokenizer: Any) -> None:
    ids = tokenizer.encode("Ab")[1:]
    # The client takes each token before the next one arrives.
    gateway.engine.script = lambda add: Script(token_ids=ids, delay_s=0.001)
    body = {"model": "base", "prompt": "Yes", "stream": True, "stream_options": {"include_usage": True}}
    response = await gateway.http.post("/v1/completions", json=body)
    assert response.headers["content-type"].startswith("text/event-stream")
    *events, last = response.text.removesuffix("\n\n").split("\n\n")
    assert last == "data: [DONE]"
    chunks = [json.loads(event.removeprefix("data: ")) for event in events]
    head = {
        "id": response.headers["x-request-id"].replace("req_", "cmpl-"),
        "object": "text_completion",
        "created": chunks[0]["created"],
        "model": "base",
        "service_tier": "default",
    }
    texts = [tokenizer.decode([token]) for token in ids]

    def chunk(text: str, finish_reason: str | None) -> dict[str, Any]:
        choice = {"text": text, "index": 0, "logprobs": None, "finish_reason": finish_reason, "stop_reason": None}
        return {**head, "choices": [choice], "usage": None}

    assert chunks == [
        *(chunk(text, None) for text in texts),
        chunk("", "stop"),
        {
            **head,
            "choices": [],
            "usage": {
                "prompt_tokens": len(tokenizer.encode("Yes")),
                "completion_tokens": len(ids) + 1,
                "total_tokens": len(tokenizer.encode("Yes")) + len(ids) + 1,
                "prompt_tokens_details": {"cached_tokens": 0},
            },
        },
    ]


async def test_streamed_and_whole_answers_are_equal(gateway: Any) -> None:
    asked = {"model": "base", "prompt": f"{MAIN} — é 漢字 🦊", "max_tokens": 60}
    whole = await gateway.openai.completions.create(**asked)
    stream = await gateway.openai.completions.create(**asked, stream=True)
    chunks = [chunk async for chunk in stream]
    assert "".join(chunk.choices[0].text for chunk in chunks) == whole.choices[0].text
    assert "🦊" in whole.choices[0].text
    assert chunks[-1].choices[0].finish_reason == "length"
    assert all(chunk.usage is None for chunk in chunks)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
async def test_choices_are_ordered_and_each_prompt_is_charged_once(gateway: Any, tokenizer: Any, stream: bool) -> None:
    prompts = ["one two", "three four five"]
    answer = await gateway.openai.completions.create(
        model="base",
        prompt=prompts,
        n=2,
        max_tokens=3,
        seed=7,
        stream=stream,
        **({"stream_options": {"include_usage": True}} if stream else {}),
    )
    texts = dict.fromkeys(range(4), "")
    if stream:
        async for chunk in answer:
            for choice in chunk.choices:
                texts[choice.index] += choice.text
        usage = chunk.usage
    else:
        texts = {choice.index: choice.text for choice in answer.choices}
        usage = answer.usage
    assert texts[0] == texts[1]
    assert texts[2] == texts[3]
    assert "one two".startswith(texts[0].strip())
    assert "three four five".startswith(texts[2].strip())
    assert usage.prompt_tokens == sum(len(tokenizer.encode(prompt)) for prompt in prompts)
    assert usage.completion_tokens == 12
    assert [add.sampling.seed for add in gateway.engine.adds] == [7, 8, 7, 8]
    [event] = gateway.usage()
    assert (event.prompt_tokens, event.completion_tokens) == (usage.prompt_tokens, 12)


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ([5, 6, 7], [(5, 6, 7)]),
        ([[5, 6], [7]], [(5, 6), (7,)]),
        (["a"], None),
    ],
    ids=["token ids", "lists of token ids", "list of one text"],
)
async def test_every_form_of_prompt_is_accepted(gateway: Any, tokenizer: Any, prompt: Any, expected: Any) -> None:
    await gateway.openai.completions.create(model="base", prompt=prompt, max_tokens=1)
    assert [add.prompt for add in gateway.engine.adds] == (expected or [tokenizer.encode("a")])


async def test_sampling_reaches_the_engine(gateway: Any) -> None:
    await gateway.openai.completions.create(
        model="base",
        prompt="a",
        temperature=0,
        top_p=0.5,
        seed=-3,
        extra_body={"top_k": -1, "min_tokens": 2, "ignore_eos": True, "stop_token_ids": [3, 4]},
    )
    [add] = gateway.engine.adds
    assert add.max_tokens == 16
    sampling = add.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.seed) == (0, 0.5, 0, -3)
    assert (sampling.min_tokens, sampling.ignore_eos, sampling.stop_token_ids) == (2, True, (3, 4))
    assert sampling.num_logprobs is None


async def test_bias_and_penalties_reach_the_engine(gateway: Any) -> None:
    await gateway.openai.completions.create(
        model="base",
        prompt="a",
        presence_penalty=-2,
        frequency_penalty=0.5,
        logit_bias={"9": -100, "5": 1, "7": 0},
        extra_body={"min_p": 0.25, "repetition_penalty": 1.1},
    )
    await gateway.openai.completions.create(model="base", prompt="a", logit_bias={}, presence_penalty=None)
    most = {str(token): 1 for token in range(300)}
    await gateway.openai.completions.create(model="base", prompt="a", logit_bias=most)
    sampling, plain, biased = [add.sampling for add in gateway.engine.adds]
    assert (sampling.presence_penalty, sampling.frequency_penalty) == (-2, 0.5)
    assert (sampling.min_p, sampling.repetition_penalty) == (0.25, 1.1)
    # A bias of zero is dropped because it changes nothing.
    assert sampling.logit_bias == ((5, 1), (9, -100))
    assert (plain.logit_bias, plain.has_penalties, plain.min_p) == ((), False, 0)
    assert len(biased.logit_bias) == 300
    assert all(sampling_problem(one, 1024) is None for one in (sampling, plain, biased))


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
async def test_echo_begins_each_choice_with_its_prompt(gateway: Any, tokenizer: Any, stream: bool) -> None:
    ids = tokenizer.encode(" and on.")[1:]
    gateway.engine.script = lambda add: Script(token_ids=ids)
    prompts = ["One harbour", "Zwei Häfen 🦊"]
    for prompt in (prompts, [list(tokenizer.encode(one)) for one in prompts]):
        answer = await gateway.openai.completions.create(
            model="base", prompt=prompt, n=2, max_tokens=len(ids), echo=True, stream=stream
        )
        texts = dict.fromkeys(range(4), "")
        if stream:
            async for chunk in answer:
                for choice in chunk.choices:
                    texts[choice.index] += choice.text
        else:
            texts = {choice.index: choice.text for choice in answer.choices}
            assert answer.usage.completion_tokens == 4 * len(ids)
        assert list(texts.values()) == [f"{one} and on." for one in prompts for _ in range(2)]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
async def test_echo_of_a_prompt_that_ends_inside_a_character(gateway: Any, tokenizer: Any, stream: bool) -> None:
    *prompt, last = tokenizer.encode("One 🦊")
    more = tokenizer.encode(" and on.")[1:]
    for token_ids, expected in (((last, *more), "One 🦊 and on."), (more, "One \ufffd and on.")):
        gateway.engine.script = lambda add, token_ids=token_ids: Script(token_ids=token_ids)
        answer = await gateway.openai.completions.create(
            model="base", prompt=prompt, max_tokens=len(token_ids), echo=True, stream=stream
        )
        text = answer.choices[0].text if not stream else "".join([one.choices[0].text async for one in answer])
        assert text == expected
    answer = await gateway.openai.completions.create(model="base", prompt=prompt, max_tokens=0, echo=True)
    assert answer.choices[0].text == "One \ufffd"


async def test_stop_strings_are_not_matched_in_an_echo(gateway: Any, tokenizer: Any) -> None:
    gateway.engine.script = lambda add: Script(token_ids=tokenizer.encode(" yes. no")[1:])
    answer = await gateway.openai.completions.create(
        model="base", prompt="Stop. Here", max_tokens=30, stop=".", echo=True
    )
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == ("Stop. Here yes", "stop")


async def test_the_default_limit_never_exceeds_the_context(gateway: Any) -> None:
    await gateway.openai.completions.create(model="base", prompt=[5] * 250)
    assert gateway.engine.adds[0].max_tokens == 6


async def test_logprobs_have_openais_legacy_form(gateway: Any, tokenizer: Any) -> None:
    ids = tokenizer.encode("Hi é")[1:]
    gateway.engine.script = lambda add: Script(token_ids=ids)
    answer = await gateway.openai.completions.create(model="base", prompt="a", max_tokens=len(ids), logprobs=2)
    logprobs = answer.choices[0].logprobs
    assert "".join(tokenizer.token_bytes(token).decode("latin-1") for token in ids).encode("latin-1").decode() == (
        "Hi é"
    )
    assert logprobs.token_logprobs == [-0.5] * len(ids)
    assert all(len(top) == 2 for top in logprobs.top_logprobs)
    assert logprobs.text_offset[0] == 0
    stream = await gateway.openai.completions.create(
        model="base", prompt="a", max_tokens=len(ids), logprobs=2, stream=True
    )
    parts = [choice.logprobs async for chunk in stream for choice in chunk.choices if choice.logprobs]
    assert [token for part in parts for token in part.tokens] == logprobs.tokens
    assert [offset for part in parts for offset in part.text_offset] == logprobs.text_offset


async def test_logprobs_can_be_zero_or_up_to_five(gateway: Any, tokenizer: Any) -> None:
    for asked, num_shown in ((5, 5), (0, 1)):
        answer = await gateway.openai.completions.create(model="base", prompt="a", max_tokens=2, logprobs=asked)
        assert [len(top) for top in answer.choices[0].logprobs.top_logprobs] == [num_shown] * 2


async def test_stop_string_across_tokens_ends_the_answer_and_the_billing(gateway: Any, tokenizer: Any) -> None:
    ids = tokenizer.encode("First. Second and third.")[1:]
    gateway.engine.script = lambda add: Script(token_ids=ids, tokens_per_output=3)
    answer = await gateway.openai.completions.create(model="base", prompt="a", max_tokens=100, stop=["never", ". Sec"])
    assert answer.choices[0].text == "First"
    assert answer.choices[0].finish_reason == "stop"
    needed = next(n for n in range(len(ids)) if ". Sec" in tokenizer.decode(ids[:n]))
    assert answer.usage.completion_tokens == needed
    assert len(gateway.engine.aborts) == 1
    assert gateway.usage()[0].status == "completed"
    committed = (await gateway.engine.call(StatsRequest(), 1.0)).completion_tokens
    assert committed > needed
    assert f'kind="discarded"}} {float(committed - needed)}' in gateway.services.metrics.render().decode()


async def test_no_part_of_a_stop_string_is_streamed(gateway: Any, tokenizer: Any) -> None:
    ids = tokenizer.encode("one STOX two STOP three")[1:]
    gateway.engine.script = lambda add: Script(token_ids=ids)
    stream = await gateway.openai.completions.create(model="base", prompt="a", max_tokens=100, stop="STOP", stream=True)
    texts = [chunk.choices[0].text async for chunk in stream]
    assert "".join(texts) == "one STOX two "
    for end in range(len(texts)):
        assert not "".join(texts[:end]).endswith(("S", "ST", "STO"))


async def test_partial_stop_string_at_the_end_is_emitted(gateway: Any, tokenizer: Any) -> None:
    gateway.engine.script = lambda add: Script(token_ids=tokenizer.encode("one ST")[1:])
    answer = await gateway.openai.completions.create(model="base", prompt="a", max_tokens=100, stop="STOP")
    assert answer.choices[0].text == "one ST"


async def test_stop_strings_apply_only_after_min_tokens(gateway: Any, tokenizer: Any) -> None:
    ids = tokenizer.encode("x. y. z. end")[1:]
    gateway.engine.script = lambda add: Script(token_ids=ids)
    answer = await gateway.openai.completions.create(
        model="base", prompt="a", max_tokens=100, stop=".", extra_body={"min_tokens": 3}
    )
    assert answer.choices[0].text.count(".") == 1


@pytest.mark.parametrize(
    ("asked", "is_told_each"),
    [({}, False), ({"stream": True}, True), ({"stop": "x"}, True)],
    ids=["whole", "streamed", "stop-string"],
)
async def test_only_whole_answers_receive_tokens_in_batches(gateway: Any, asked: Any, is_told_each: bool) -> None:
    gateway.engine.script = lambda add: Script(token_ids=(5, 6, 7))
    answer = await gateway.openai.completions.create(model="base", prompt="a", **asked)
    if "stream" in asked:
        async for _ in answer:
            pass
    [add] = gateway.engine.adds
    assert (add.tokens_at_once == 1) == is_told_each
