"""The log-probabilities, offsets and counts of tokens in answers, whole and streamed."""

from __future__ import annotations

from typing import Any

import pytest

from loramux.engine.protocol.messages import PromptLogprob, TokenLogprobs
from loramux.engine.text.detokenizer import new_detokenizer
from loramux.platform.generation.choice import ChoiceDelta
from loramux.platform.generation.generation import Usage
from loramux.platform.openai_api.completion_answer import CompletionAnswer
from loramux.platform.openai_api.text_offsets import TextOffsets, prompt_offsets
from tests.platform.openai_api.test_request_fields import BOTH, CHAT, TEXT, answer_of, chunks_of, text_of
from tests.platform.scripted_engine import Script
from tests.platform.tokenizer.test_text import sentencepiece_like

pytestmark = pytest.mark.anyio

STREAMED = pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
USAGE = {"include_usage": True, "continuous_usage_stats": True}


def asking(path: str, count: int = 1) -> dict[str, Any]:
    return {"logprobs": True, "top_logprobs": count} if path == CHAT else {"logprobs": count}


def entries_of(logprobs: dict[str, Any] | None) -> list[tuple[str, float]]:
    """The tokens and their log-probabilities, in either endpoint's form."""
    if logprobs is None:
        return []
    if "content" in logprobs:
        return [(one["token"], one["logprob"]) for one in logprobs["content"]]
    return list(zip(logprobs["tokens"], logprobs["token_logprobs"], strict=True))


async def scored(
    gateway: Any, path: str, stream: bool, **fields: Any
) -> tuple[list[int], list[tuple[str, float]], int]:
    """The token IDs of the first choice, its log-probabilities and the number of completion tokens."""
    fields |= {**asking(path), "return_token_ids": True, "return_tokens_as_token_ids": True}
    if not stream:
        answer = await answer_of(gateway, path, **fields)
        [choice] = answer["choices"]
        return choice["token_ids"], entries_of(choice["logprobs"]), answer["usage"]["completion_tokens"]
    *chunks, last = await chunks_of(gateway, path, stream_options={"include_usage": True}, **fields)
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    ids = [token_id for choice in choices for token_id in choice["token_ids"]]
    found = [entry for choice in choices for entry in entries_of(choice["logprobs"])]
    return ids, found, last["usage"]["completion_tokens"]


@BOTH
@STREAMED
@pytest.mark.parametrize(
    ("script", "fields"),
    [
        ({"text": "Hi é 🦊", "stop": "!"}, {}),
        ({"text": "", "stop": "!"}, {}),
        ({"text": "Hi é 🦊", "stop": "!"}, {"include_stop_str_in_output": True, "skip_special_tokens": False}),
        ({"text": "Hi é 🦊", "stop": "!"}, {"stop": "never"}),
        ({"text": "First. Second and third.", "stop": "!"}, {"stop": ". Sec"}),
        ({"text": "First. Sec", "stop": "!"}, {"stop": ". Second"}),
        ({"text": "Hi é 🦊", "stop": None}, {"max_tokens": 3}),
    ],
    ids=["end", "only an end", "shown end", "end and unused stop string", "stop string", "half", "length"],
)
@pytest.mark.parametrize("tokens_per_output", [1, 3])
async def test_every_billed_token_has_one_entry(
    gateway: Any,
    tokenizer: Any,
    path: str,
    stream: bool,
    script: dict[str, Any],
    fields: dict[str, Any],
    tokens_per_output: int,
) -> None:
    ids = tokenizer.encode(script["text"])[1:]
    stop = None if script["stop"] is None else tokenizer.encode(script["stop"])[-1]
    gateway.engine.script = lambda add: Script(
        token_ids=ids, tokens_per_output=tokens_per_output, stop_token_id=stop, logprob=-0.25
    )
    shown, entries, num_billed = await scored(gateway, path, stream, **{"max_tokens": 60, **fields})
    assert entries == [(f"token_id:{token_id}", -0.25) for token_id in shown]
    assert len(entries) == num_billed == gateway.usage()[0].completion_tokens
    if stop is not None and "stop" not in fields:
        assert shown == [*ids, stop]


async def test_the_best_choice_counts_its_end(gateway: Any, tokenizer: Any) -> None:
    # The shorter answer has the higher mean only if its end counts, too.
    texts = {"0": ("a", -3.0), "1": ("", -1.0)}

    def script(add: Any) -> Script:
        text, logprob = texts[add.sequence_id[-1]]
        return Script(token_ids=tokenizer.encode(text)[1:], logprob=logprob, stop_token_id=1)

    gateway.engine.script = script
    answer = await answer_of(gateway, TEXT, best_of=2, n=1, max_tokens=4)
    assert text_of(answer["choices"][0]) == ""


async def test_the_harness_reads_the_scores_of_the_prompt(gateway: Any, tokenizer: Any) -> None:
    """lm-eval sends `echo`, `logprobs` and `max_tokens: 1`, and drops the last entry."""
    prompt = tokenizer.encode("one two three")
    gateway.engine.script = lambda add: Script(token_ids=(), stop_token_id=1, logprob=-0.5)
    answer = await gateway.openai.completions.create(
        model="base", prompt=list(prompt), max_tokens=1, echo=True, logprobs=1
    )
    shown = answer.choices[0].logprobs
    assert shown.token_logprobs[:-1] == [None, *[-0.5] * (len(prompt) - 1)]
    assert len(shown.tokens) == len(shown.top_logprobs) == len(shown.text_offset) == len(prompt) + 1
    assert shown.text_offset[-1] == len(answer.choices[0].text)


@pytest.mark.parametrize(
    ("prompt", "starts"),
    [
        ("Hello, my name is", [0, 0, 5, 6]),
        ("<|user|>Hello", [0, 0, 8]),
        ("<|bos|>Hello", [0, 7, 7]),
        ("", [0]),
    ],
    ids=["plain", "special token", "start token twice", "empty"],
)
async def test_offsets_count_the_characters_of_an_echo(
    gateway: Any, tokenizer: Any, prompt: str, starts: list[int]
) -> None:
    answer = await gateway.openai.completions.create(model="base", prompt=prompt, max_tokens=2, echo=True, logprobs=0)
    choice, num_prompt = answer.choices[0], len(tokenizer.encode(prompt))
    offsets = choice.logprobs.text_offset
    assert offsets[: min(len(starts), num_prompt)] == starts[:num_prompt]
    assert offsets == sorted(offsets)
    assert offsets[num_prompt] == len(prompt)
    assert offsets[-1] <= len(choice.text)


@pytest.mark.parametrize("skips", [True, False], ids=["special tokens hidden", "special tokens shown"])
async def test_each_token_stands_at_its_offset(gateway: Any, tokenizer: Any, skips: bool) -> None:
    begin, *ids = tokenizer.encode("Hi, é 🦊 there")
    prompt = [begin, *ids, begin, *ids]
    gateway.engine.script = lambda add: Script(token_ids=(*ids, begin, *ids), stop_token_id=1)
    answer = await gateway.openai.completions.create(
        model="base", prompt=prompt, max_tokens=90, echo=True, logprobs=0, extra_body={"skip_special_tokens": skips}
    )
    [choice] = answer.choices
    shown, texts = choice.logprobs, []
    for token, start, end in zip(
        shown.tokens, shown.text_offset, [*shown.text_offset[1:], len(choice.text)], strict=True
    ):
        text = choice.text[start:end]
        if not token.startswith("bytes:"):
            assert text in (token, "" if skips or token == shown.tokens[-1] else None), (token, text)
        texts.append(text)
    assert "".join(texts) == choice.text


@pytest.mark.parametrize("tokens_per_output", [1, 4])
async def test_streamed_offsets_are_those_of_the_whole_text(
    gateway: Any, tokenizer: Any, tokens_per_output: int
) -> None:
    ids = tokenizer.encode("Hi é 🦊. Second and third.")[1:]
    gateway.engine.script = lambda add: Script(token_ids=ids, tokens_per_output=tokens_per_output, stop_token_id=1)
    for stop in (None, ".", "never"):
        asked = {"max_tokens": 90, "logprobs": 1, "stop": stop}
        whole = (await answer_of(gateway, TEXT, **asked))["choices"][0]
        chunks = await chunks_of(gateway, TEXT, **asked)
        parts = [choice["logprobs"] for chunk in chunks for choice in chunk["choices"] if choice["logprobs"]]
        assert [offset for part in parts for offset in part["text_offset"]] == whole["logprobs"]["text_offset"]
        assert max(whole["logprobs"]["text_offset"]) <= len(whole["text"])


def test_offsets_are_those_of_a_sentencepiece_text() -> None:
    tokenizer = sentencepiece_like()
    # The first token has a leading space, which the text lacks. Four tokens spell one character.
    ids = [1, 2, 3, *(4 + byte for byte in "🦊".encode()), 1]
    text = tokenizer.decode(ids)
    assert text == "Hello worlding🦊 Hello"
    assert prompt_offsets(tokenizer, ids, text) == [0, 5, 11, 14, 14, 14, 14, 15]
    answer = TextOffsets(new_detokenizer(tokenizer, ids, skip_special_tokens=True))
    assert [*answer.of(ids[:3]), *answer.of(ids[3:])] == [0, 6, 12, 15, 15, 15, 15, 16]


async def test_each_chunk_counts_the_tokens_so_far(gateway: Any, tokenizer: Any) -> None:
    gateway.engine.script = lambda add: Script(token_ids=tokenizer.encode("Hi 🦊")[1:], stop_token_id=1, delay_s=0.001)
    fields = {"n": 2, "stream_options": USAGE, "return_token_ids": True, "max_tokens": 40}
    for path in (CHAT, TEXT):
        *chunks, last = await chunks_of(gateway, path, **fields)
        num_sent = 0
        for chunk in chunks:
            # The chunk with the role carries no token.
            num_sent += sum(len(choice.get("token_ids", ())) for choice in chunk["choices"])
            assert chunk["usage"]["completion_tokens"] == num_sent
        assert num_sent == last["usage"]["completion_tokens"]


@BOTH
async def test_continuous_usage_without_usage_sends_none(gateway: Any, path: str) -> None:
    for include in (False, None):
        options = {"include_usage": include, "continuous_usage_stats": True}
        chunks = await chunks_of(gateway, path, max_tokens=3, stream_options=options)
        assert chunks
        assert not any("usage" in chunk or not chunk["choices"] for chunk in chunks)


@BOTH
async def test_the_chunk_with_the_finish_reason_has_no_log_probabilities(
    gateway: Any, tokenizer: Any, path: str
) -> None:
    ids = tokenizer.encode("Hi. there")[1:]
    for script, stop in ((Script(token_ids=ids, stop_token_id=1), None), (Script(token_ids=ids), ". the")):
        gateway.engine.script = lambda add, script=script: script
        chunks = await chunks_of(gateway, path, max_tokens=40, stop=stop, **asking(path))
        *before, end = [choice for chunk in chunks for choice in chunk["choices"]]
        assert (end["finish_reason"], end["logprobs"]) == ("stop", None)
        assert [choice["finish_reason"] for choice in before] == [None] * len(before)
        assert before[-1]["logprobs"]


def test_the_own_token_is_listed_first(tokenizer: Any) -> None:
    """As in vLLM: the first key is the position's own token, even if other tokens are likelier."""
    top = ((300, -0.1), (301, -0.2), (302, -0.3))
    own, prompt = TokenLogprobs(302, -0.3, top), PromptLogprob(303, -4.0, 9, top)
    answer = CompletionAnswer(
        id="cmpl-1",
        model="m",
        created_s=1,
        tokenizer=tokenizer,
        has_logprobs=True,
        include_usage=False,
        service_tier="default",
        prompts=[(300, 303)],
        echoes=["ab"],
        echoes_logprobs=True,
        num_alternatives=2,
        names_tokens_by_id=True,
        num_prompt_logprobs=3,
    )
    delta = ChoiceDelta(0, "c", (own,), "length", (302,), prompt_logprobs=(prompt,))
    [choice] = answer.whole([delta], Usage(2, 1, 0))["choices"]
    assert [one and list(one) for one in choice["logprobs"]["top_logprobs"]] == [
        None,
        ["token_id:303", "token_id:300", "token_id:301"],
        ["token_id:302", "token_id:300", "token_id:301"],
    ]
    [_, shown] = choice["prompt_logprobs"]
    assert {token: one["rank"] for token, one in shown.items()} == {"303": 9, "300": 1, "301": 2, "302": 3}
    assert next(iter(shown)) == "303"
