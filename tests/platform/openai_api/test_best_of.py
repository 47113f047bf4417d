from __future__ import annotations

from typing import Any

import openai
import pytest

from tests.platform.scripted_engine import Script

pytestmark = pytest.mark.anyio

MEANS = (-3.0, -1.0, -2.0, -0.5)
"""Mean log-probability of each choice. The better choices are longer, so their sums are lower."""


def scripts(gateway: Any, tokenizer: Any, tokens_per_output: int = 1) -> list[tuple[int, ...]]:
    """Make the engine answer each prompt with these four choices, and return their token IDs."""
    texts = ["bad", "good good good good", "fair fair fair", "best best best best best best best"]
    ids = [tuple(tokenizer.encode(text)[1:]) for text in texts]

    def script(add: Any) -> Script:
        choice = int(add.sequence_id.rpartition("-")[2]) % 4
        return Script(token_ids=ids[choice], logprob=MEANS[choice], tokens_per_output=tokens_per_output)

    gateway.engine.script = script
    return ids


@pytest.mark.parametrize("tokens_per_output", [1, 3])
async def test_best_choices_are_returned_and_all_are_billed(
    gateway: Any, tokenizer: Any, tokens_per_output: int
) -> None:
    ids = scripts(gateway, tokenizer, tokens_per_output)
    answer = await gateway.openai.completions.create(
        model="base", prompt=["one", "two"], n=2, best_of=4, max_tokens=60, echo=True, seed=3
    )
    words = ["best", "good"]
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    for choice in answer.choices:
        assert choice.text.startswith(["one", "two"][choice.index // 2] + words[choice.index % 2])
        assert choice.logprobs is None
    assert len(gateway.engine.adds) == 8
    assert [add.sampling.seed for add in gateway.engine.adds] == [3, 4, 5, 6] * 2
    # Each choice ends with an end-of-sequence token.
    assert answer.usage.completion_tokens == 2 * sum(len(one) + 1 for one in ids)
    [event] = gateway.usage()
    assert (event.prompt_tokens, event.completion_tokens) == (
        answer.usage.prompt_tokens,
        answer.usage.completion_tokens,
    )
    assert answer.usage.prompt_tokens == sum(len(tokenizer.encode(prompt)) for prompt in ("one", "two"))


async def test_requested_logprobs_and_token_ids_are_those_of_the_best(gateway: Any, tokenizer: Any) -> None:
    ids = scripts(gateway, tokenizer)
    answer = await gateway.openai.completions.create(
        model="base", prompt="one", best_of=4, logprobs=2, max_tokens=60, extra_body={"return_token_ids": True}
    )
    [choice] = answer.choices
    assert choice.token_ids == list(ids[3])
    assert set(choice.logprobs.token_logprobs) == {-0.5}
    assert {add.sampling.num_logprobs for add in gateway.engine.adds} == {2}


async def test_every_choice_is_reserved(gateway: Any, tokenizer: Any) -> None:
    scripts(gateway, tokenizer)
    gateway.limit("tokens_per_minute", 100)
    asked = {"model": "base", "prompt": "one", "max_tokens": 20}
    with pytest.raises(openai.BadRequestError) as refused:
        await gateway.openai.completions.create(**asked, best_of=5)
    assert refused.value.code == "request_too_large"
    await gateway.openai.completions.create(**asked, best_of=4)
    assert len(gateway.engine.adds) == 4
    assert len(gateway.usage()) == 1


async def test_an_empty_choice_is_never_the_best(gateway: Any, tokenizer: Any) -> None:
    ids = tokenizer.encode("x")[1:]
    gateway.engine.script = lambda add: Script(token_ids=() if add.sequence_id.endswith("0") else ids, logprob=-9.0)
    answer = await gateway.openai.completions.create(model="base", prompt="one", best_of=2, max_tokens=5)
    assert answer.choices[0].text == "x"


@pytest.mark.parametrize(("n", "best_of"), [(2, 2), (1, 1), (2, 1), (None, None)])
async def test_choices_keep_their_order_if_none_is_left_out(
    gateway: Any, tokenizer: Any, n: int | None, best_of: int | None
) -> None:
    ids = scripts(gateway, tokenizer)
    answer = await gateway.openai.completions.create(model="base", prompt="a", max_tokens=60, n=n, best_of=best_of)
    assert [choice.text for choice in answer.choices] == [tokenizer.decode(ids[i]) for i in range(n or 1)]
    stream = await gateway.openai.completions.create(
        model="base", prompt="a", max_tokens=60, n=n, best_of=best_of, stream=True
    )
    assert {choice.index async for chunk in stream for choice in chunk.choices} == set(range(n or 1))
    assert {add.sampling.num_logprobs for add in gateway.engine.adds} == {None}
