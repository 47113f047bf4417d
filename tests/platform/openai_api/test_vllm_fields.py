"""Fields of vLLM and SGLang that change or extend an answer."""

from __future__ import annotations

from typing import Any

import pytest

from loramux.platform.bodies.chat_request import ChatRequest
from loramux.platform.errors import InvalidRequest
from loramux.platform.openai_api.completion_request import CompletionRequest
from tests.platform.gateways import Gateway
from tests.platform.openai_api.test_bad_input import refused
from tests.platform.openai_api.test_request_fields import BOTH, CHAT, TEXT, answer_of, body_for, chunks_of, text_of
from tests.platform.scripted_engine import Script

pytestmark = pytest.mark.anyio

CHOICE_NULLS = {CHAT: ("token_ids",), TEXT: ("token_ids", "prompt_token_ids", "prompt_logprobs")}


@BOTH
async def test_fields_that_were_not_asked_for_are_null(gateway: Gateway, path: str) -> None:
    answer = await answer_of(gateway, path, max_tokens=2)
    [choice] = answer["choices"]
    assert {name: choice[name] for name in CHOICE_NULLS[path]} == dict.fromkeys(CHOICE_NULLS[path])
    assert choice["stop_reason"] is None
    if path == CHAT:
        assert answer["prompt_logprobs"] is answer["prompt_token_ids"] is None


@BOTH
@pytest.mark.parametrize(
    ("text", "end", "fields", "reason", "stop_reason"),
    [
        ("Hi. there", 1, {}, "stop", None),
        ("Hi. there", 1, {"stop_token_ids": [1, 7]}, "stop", None),
        ("Hi. there", 1, {"stop_token_ids": [1], "ignore_eos": True}, "stop", 1),
        ("Hi. there", 7, {"stop_token_ids": [7]}, "stop", 7),
        ("Hi. there", 1, {"stop": ["never", ". th"]}, "stop", ". th"),
        ("Hi. there", 1, {"stop": "here", "include_stop_str_in_output": True}, "stop", "here"),
        ("Hi. there", 1, {"max_tokens": 2, "stop": "zzz"}, "length", None),
    ],
    ids=["end", "named end", "ignored end", "stop token", "stop string", "shown stop string", "length"],
)
async def test_stop_reason_names_the_string_or_token(
    gateway: Gateway,
    tokenizer: Any,
    path: str,
    text: str,
    end: int,
    fields: dict[str, Any],
    reason: str,
    stop_reason: str | int | None,
) -> None:
    gateway.engine.script = lambda add: Script(token_ids=tokenizer.encode(text)[1:], stop_token_id=end)
    asked = {"max_tokens": 40, **fields}
    [whole] = (await answer_of(gateway, path, **asked))["choices"]
    *_, last = await chunks_of(gateway, path, **asked)
    for choice in (whole, last["choices"][0]):
        assert (choice["finish_reason"], choice["stop_reason"]) == (reason, stop_reason)


@BOTH
async def test_named_tokens_are_listed_after_the_chosen_one(gateway: Gateway, path: str) -> None:
    fields = {"logprobs": True, "top_logprobs": 5} if path == CHAT else {"logprobs": 5}
    fields |= {"logprob_token_ids": [9, 5, 9, 30], "return_tokens_as_token_ids": True, "max_tokens": 2}
    [whole] = (await answer_of(gateway, path, text="x", **fields))["choices"]
    chunks = await chunks_of(gateway, path, text="x", **fields)
    parts = [whole, *(choice for chunk in chunks for choice in chunk["choices"] if choice["logprobs"])]
    assert len(parts) > 1
    for part in parts:
        shown = part["logprobs"]
        if path == CHAT:
            tops = [(one["token"], [top["token"] for top in one["top_logprobs"]]) for one in shown["content"]]
        else:
            tops = list(zip(shown["tokens"], map(list, shown["top_logprobs"]), strict=True))
        for token, top in tops:
            assert top == list(dict.fromkeys((token, "token_id:9", "token_id:5", "token_id:30")))
    assert gateway.engine.adds[0].sampling.logprob_token_ids == (9, 5, 30)


async def test_an_echoed_prompt_keeps_its_likeliest_tokens(gateway: Gateway) -> None:
    fields = {"logprobs": 2, "logprob_token_ids": [30], "return_tokens_as_token_ids": True, "echo": True}
    [choice] = (await answer_of(gateway, TEXT, text="one two", max_tokens=1, **fields))["choices"]
    *prompt, generated = choice["logprobs"]["top_logprobs"]
    assert list(generated) == [choice["logprobs"]["tokens"][-1], "token_id:30"]
    assert prompt[0] is None
    assert all(len(one) == 2 and "token_id:30" not in one for one in prompt[1:])


@BOTH
@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"logprob_token_ids": [5]}, "logprob_token_ids"),
        ({"logprob_token_ids": [1024], "logprobs": True}, "logprob_token_ids"),
        ({"logprob_token_ids": [-1], "logprobs": True}, "logprob_token_ids"),
        ({"logprob_token_ids": [5] * 129, "logprobs": True}, "logprob_token_ids"),
    ],
    ids=["without logprobs", "unknown token", "negative", "too many"],
)
async def test_unusable_named_tokens_are_refused(
    gateway: Gateway, path: str, fields: dict[str, Any], param: str
) -> None:
    if path == TEXT and "logprobs" in fields:
        fields = {**fields, "logprobs": 1}
    await refused(gateway, path, 400, "invalid_value", param, json=body_for(path, **fields))


async def test_named_tokens_need_a_generated_token(gateway: Gateway) -> None:
    fields = {"max_tokens": 0, "echo": True, "logprobs": 1, "logprob_token_ids": [5]}
    await refused(gateway, TEXT, 400, "invalid_value", "logprob_token_ids", json=body_for(TEXT, **fields))
    # Ranking computes log-probabilities, but shows none.
    await refused(
        gateway, TEXT, 400, "invalid_value", "logprob_token_ids", json=body_for(TEXT, best_of=2, logprob_token_ids=[5])
    )


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
async def test_hidden_reasoning_is_in_no_field(tools: Gateway, stream: bool) -> None:
    ids = tools.services.prompts.tokenizer.encode("<think>Hot?</think>Yes.", add_special_tokens=False)
    tools.engine.script = lambda add: Script(token_ids=ids, stop_token_id=1)
    fields = {
        "include_reasoning": False,
        "logprobs": True,
        "return_token_ids": True,
        "reasoning_effort": "high",
        "max_tokens": 90,
    }
    if stream:
        *chunks, last = await chunks_of(tools, CHAT, stream_options={"include_usage": True}, **fields)
        choices = [choice for chunk in chunks for choice in chunk["choices"]]
        assert "".join(choice["delta"].get("content", "") for choice in choices) == "Yes."
        assert not any("reasoning" in choice["delta"] or choice.get("token_ids") for choice in choices)
        usage, prompt_ids = last["usage"], chunks[0]["prompt_token_ids"]
    else:
        answer = await answer_of(tools, CHAT, **fields)
        choices, usage, prompt_ids = answer["choices"], answer["usage"], answer["prompt_token_ids"]
        assert choices[0]["message"] == {"role": "assistant", "content": "Yes.", "refusal": None}
        assert choices[0]["token_ids"] is None
    assert all(choice["logprobs"] is None for choice in choices)
    assert prompt_ids
    # It is billed like any other.
    assert usage["completion_tokens"] == len(ids) + 1 == tools.usage()[0].completion_tokens
    assert usage["completion_tokens_details"]["reasoning_tokens"] > 0


async def test_include_reasoning_changes_no_answer_without_reasoning(gateway: Gateway) -> None:
    answer = await answer_of(gateway, CHAT, include_reasoning=False, logprobs=True, return_token_ids=True, max_tokens=2)
    assert len(answer["choices"][0]["logprobs"]["content"]) == len(answer["choices"][0]["token_ids"]) == 2


@BOTH
async def test_log_probabilities_name_tokens_by_id(gateway: Gateway, tokenizer: Any, path: str) -> None:
    ids = tokenizer.encode("é 🦊")[1:]
    gateway.engine.script = lambda add: Script(token_ids=ids)
    fields = {"logprobs": True, "top_logprobs": 1} if path == CHAT else {"logprobs": 1, "echo": True}
    [choice] = (await answer_of(gateway, path, max_tokens=len(ids), return_tokens_as_token_ids=True, **fields))[
        "choices"
    ]
    shown = choice["logprobs"]
    tokens = [one["token"] for one in shown["content"]] if path == CHAT else shown["tokens"]
    prompt = gateway.engine.adds[0].prompt if path == TEXT else ()
    assert tokens == [f"token_id:{token_id}" for token_id in (*prompt, *ids)]
    if path == CHAT:
        assert [one["top_logprobs"][0]["token"] for one in shown["content"]] == tokens
        assert b"".join(bytes(one["bytes"]) for one in shown["content"]).decode() == "é 🦊"
    else:
        assert [next(iter(one)) for one in shown["top_logprobs"][1:]] == tokens[1:]
        assert shown["text_offset"][len(prompt)] == len("Hello")


@BOTH
@pytest.mark.parametrize(
    ("field", "value"), [("regex", "[a-z]+"), ("ebnf", 'root ::= "yes" | "no"')], ids=["regex", "ebnf"]
)
async def test_sglangs_constraints_are_those_of_vllm(gateway: Gateway, path: str, field: str, value: str) -> None:
    await answer_of(gateway, path, max_tokens=2, **{field: value})
    name = "grammar" if field == "ebnf" else field
    await answer_of(gateway, path, max_tokens=2, structured_outputs={name: value})
    first, second = [add.grammar for add in gateway.engine.adds]
    assert first == second != ""


async def test_sglangs_schema_is_a_string_of_json(gateway: Gateway) -> None:
    await answer_of(gateway, TEXT, max_tokens=2, json_schema='{"type": "integer"}')
    await answer_of(gateway, TEXT, max_tokens=2, structured_outputs={"json": {"type": "integer"}})
    first, second = [add.grammar for add in gateway.engine.adds]
    assert first == second != ""


@pytest.mark.parametrize(
    ("fields", "code", "param"),
    [
        ({"regex": "("}, "grammar_refused", "regex"),
        ({"ebnf": "root ::= ("}, "grammar_refused", "ebnf"),
        ({"ebnf": ""}, "invalid_value", "ebnf"),
        ({"regex": "a" * 200_000}, "grammar_too_large", "regex"),
        ({"regex": "a", "ebnf": 'root ::= "a"'}, "invalid_value", "ebnf"),
        ({"regex": "a", "response_format": {"type": "json_object"}}, "invalid_value", "regex"),
        ({"json_schema": "{"}, "invalid_value", "json_schema"),
    ],
    ids=lambda value: repr(value)[:50],
)
async def test_sglangs_bad_constraints_are_refused(
    gateway: Gateway, fields: dict[str, Any], code: str, param: str
) -> None:
    await refused(gateway, TEXT, 400, code, param, json=body_for(TEXT, **fields))


@pytest.mark.parametrize(
    ("bias", "named"),
    [
        ({"5": 1, "one": 1, "two": 2}, ['"one"', '"two"']),
        ({"5": 1, "6": "x", "7": 200}, ['"6"', '"7"']),
        ({"1024": 1, "5": 1}, ["1024"]),
        ({"x" * 5000: 1}, ['"' + "x" * 40 + '"']),
    ],
    ids=["keys", "values", "unknown token", "long key"],
)
async def test_errors_of_a_bias_name_the_keys(gateway: Gateway, bias: dict[str, Any], named: list[str]) -> None:
    error = await refused(gateway, TEXT, 400, "invalid_value", "logit_bias", json=body_for(TEXT, logit_bias=bias))
    assert all(one in error["message"] for one in named)
    assert len(error["message"]) < 400


async def test_errors_name_few_of_many_keys(gateway: Gateway) -> None:
    bias = {f"x{index}": 1 for index in range(300)}
    error = await refused(gateway, TEXT, 400, "invalid_value", "logit_bias", json=body_for(TEXT, logit_bias=bias))
    assert error["message"].endswith('"x7" and 292 more')


@BOTH
@pytest.mark.parametrize("name", ["stop_token_ids", "allowed_token_ids"])
async def test_errors_of_lists_name_the_unknown_tokens(gateway: Gateway, path: str, name: str) -> None:
    error = await refused(gateway, path, 400, "invalid_value", name, json=body_for(path, **{name: [5, 1024, 2000]}))
    assert error["message"] == f"{name}: the model has 1024 tokens, 0 to 1023, and not 1024, 2000"


@pytest.mark.parametrize(
    ("path", "fields", "param", "most"),
    [
        (TEXT, {"logprobs": -1}, "logprobs", 5),
        (TEXT, {"prompt_logprobs": -1}, "prompt_logprobs", 5),
        (CHAT, {"logprobs": True, "top_logprobs": -1}, "top_logprobs", 20),
        (CHAT, {"prompt_logprobs": -1}, "prompt_logprobs", 5),
    ],
    ids=lambda value: repr(value)[:40],
)
async def test_all_log_probabilities_must_be_within_the_limit(
    gateway: Gateway, path: str, fields: dict[str, Any], param: str, most: int
) -> None:
    error = await refused(gateway, path, 400, "invalid_value", param, json=body_for(path, **fields))
    assert f"all 1024 tokens of the vocabulary, but at most {most}" in error["message"]


def test_all_log_probabilities_are_those_of_a_small_vocabulary() -> None:
    completion = CompletionRequest(model="m", prompt="a", logprobs=-1, prompt_logprobs=-1)
    completion.check_vocabulary(5)
    chat = ChatRequest(model="m", messages=[{"role": "user", "content": "a"}], logprobs=True, top_logprobs=-1)
    chat.check_vocabulary(20)
    for body, most in ((completion, 5), (chat, 20)):
        # The engine reports no more tokens than there are.
        assert body.sampling().num_logprobs == most
        with pytest.raises(InvalidRequest):
            body.check_vocabulary(most + 1)


@pytest.mark.parametrize(
    ("fields", "code", "param"),
    [
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {}}}},
            "missing_required_parameter",
            "response_format.json_schema.name",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "json_schema": {}}}},
            "unsupported_parameter",
            "response_format.json_schema.json_schema",
        ),
        ({"response_format": {"type": "text", "schema": {}}}, "unknown_parameter", "response_format.schema"),
        ({"response_format": {"type": "json_schema"}}, "missing_required_parameter", "response_format.json_schema"),
        ({"guided_json": 5}, "invalid_type", "guided_json"),
        ({"structured_outputs": {"json": 5}}, "invalid_type", "structured_outputs.json"),
        ({"metadata": {"a": 5}}, "invalid_type", "metadata.a"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": 5}}},
         "invalid_type", "response_format.json_schema.schema"),
        ({"response_format": {"type": "structural_tag", "format": {"type": "regex"}}},
         "missing_required_parameter", "response_format.format.pattern"),
        ({"response_format": {"type": "structural_tag", "format": {"type": "or", "elements": [{"type": "tag"}]}}},
         "missing_required_parameter", "response_format.format.elements[0].begin"),
    ],
    ids=lambda value: repr(value)[:70],
)  # fmt: skip
async def test_param_is_a_path_of_the_request(gateway: Gateway, fields: dict[str, Any], code: str, param: str) -> None:
    await refused(gateway, CHAT, 400, code, param, json=body_for(CHAT, **fields))


async def test_the_text_of_an_answer_is_unchanged_by_these_fields(gateway: Gateway) -> None:
    plain = await answer_of(gateway, TEXT, max_tokens=3)
    asked = await answer_of(
        gateway, TEXT, max_tokens=3, logprobs=1, logprob_token_ids=[5], return_tokens_as_token_ids=True
    )
    assert text_of(plain["choices"][0]) == text_of(asked["choices"][0])
    assert plain["usage"] == asked["usage"]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("role", ["assistant", "user"])
async def test_beginning_of_the_answer_is_echoed_if_asked(
    gateway: Gateway, tokenizer: Any, role: str, stream: bool
) -> None:
    gateway.engine.script = lambda add: Script(token_ids=tokenizer.encode(" end")[1:])
    fields: dict[str, Any] = {"messages": [{"role": "user", "content": "Go on"}, {"role": role, "content": "To the"}]}
    if role == "assistant":
        fields |= {"continue_final_message": True, "add_generation_prompt": False}
    for echo, expected in ((None, " end"), (False, " end"), (True, "To the end" if role == "assistant" else " end")):
        asked = {**fields, "echo": echo, "n": 2, "max_tokens": 9}
        if stream:
            choices = [choice for chunk in await chunks_of(gateway, CHAT, **asked) for choice in chunk["choices"]]
            texts = [
                "".join(choice["delta"].get("content", "") for choice in choices if choice["index"] == index)
                for index in range(2)
            ]
        else:
            texts = [text_of(choice) for choice in (await answer_of(gateway, CHAT, **asked))["choices"]]
        assert texts == [expected] * 2
