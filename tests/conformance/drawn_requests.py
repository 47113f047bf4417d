from __future__ import annotations

import json
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from tests.platform.tool_base import TEMPLATE

CHAT, COMPLETIONS, TOKENIZE = "/v1/chat/completions", "/v1/completions", "/tokenize"
RESPONSES, MESSAGES, EMBEDDINGS = "/v1/responses", "/v1/messages", "/v1/embeddings"

LAB_ADAPTERS: Mapping[str, str | None] = {
    "plain": None,
    "caller": "{{ bos_token }}House rules apply.\n" + TEMPLATE,
    "quiet": "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}> ",
    "strict": "{% if messages | length > 1 %}{{ raise_exception('one only') }}{% endif %}{{ messages[0].content }}",
}
"""The chat templates of each tenant's adapters. None stands for the base's template."""

TOOL_MODELS = ("base", "base", "plain", "caller")

PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer", "minimum": 0, "maximum": 150}},
    "required": ["name", "age"],
}
_CITY = {"type": "object", "properties": {"city": {"type": "string", "minLength": 20}}, "required": ["city"]}
_TOOLS = [
    {"type": "function", "function": {"name": "get_weather_of_city", "description": "Now.", "parameters": _CITY}},
    {"type": "function", "function": {"name": "find_person_by_name", "parameters": PERSON}},
    {"type": "function", "function": {"name": "list_everything_known", "strict": True}},
]
_ANSWERS = ("", "Rome is sunny.", "<tool_call>not a call</tool_call>", "<think>\nno\n</think>\n\nYes.")


STOPPING = "stopping"
"""The end user in requests with stop strings, which may be billed for fewer tokens than the engine committed."""

_STOPS = {"stop": ["e", "a", "never in an answer 🦊"], "user": STOPPING}

LIKELY, RARE = 93, 94
"""The tokens `x` and `y` of the demo's base."""

_UNLIKE_BIASES = ({}, {str(RARE): 10.0}, {str(RARE): 11.5})
"""With the bias of `x`, one in 8, or almost four in ten tokens are `y`."""


@dataclass(frozen=True, slots=True)
class DrawnRequest:
    """A request, and whether it must be refused with status 400."""

    kind: str
    path: str
    body: dict[str, Any]
    is_refused: bool = False
    chat: dict[str, Any] | None = None
    """The chat request with the same prompt, for a request to another endpoint that has a conversation."""

    @property
    def is_charged(self) -> bool:
        """True if the request runs in the engine."""
        return not self.is_refused and self.path != TOKENIZE

    @property
    def num_choices(self) -> int:
        """Number of choices that are generated and billed."""
        return max(self.body.get("n", 1), self.body.get("best_of", 1))

    def as_tokenize(self) -> DrawnRequest:
        """Return a body for `/tokenize` with the same prompt, which must not be token IDs."""
        assert self.path in (CHAT, RESPONSES, MESSAGES)
        return DrawnRequest("tokenize", TOKENIZE, self.chat or self.body)

    def as_response(self) -> DrawnRequest:
        """Return the same request to `/v1/responses`, or this request if that endpoint lacks one of its fields."""
        if self.path != CHAT or not self.body.keys() <= _IN_RESPONSES:
            return self
        return DrawnRequest("response", RESPONSES, _response_body(self.body), self.is_refused, self.body)

    def as_stored(self) -> DrawnRequest:
        """Return the same request with an answer that is stored, and for a response, made in the background."""
        if self.is_refused or self.path not in (CHAT, RESPONSES) or not self.body.get("stream"):
            return self
        stored = {"background": True} if self.path == RESPONSES else {"store": True}
        kind = "background" if self.path == RESPONSES else "stored chat"
        return DrawnRequest(kind, self.path, {**self.body, **stored}, chat=self.chat or self.body)

    def as_message(self) -> DrawnRequest:
        """Return the same request to `/v1/messages`, or this request if that endpoint lacks one of its fields."""
        if self.path != CHAT or self.is_refused or not self.body.keys() <= _IN_MESSAGES:
            return self
        # Without `thinking`, a Messages request asks for none. Its tools must have a schema.
        chat = {**self.body, "reasoning_effort": "none"}
        if "tools" in chat:
            functions = ({"parameters": {"type": "object"}, **tool["function"]} for tool in chat["tools"])
            chat["tools"] = [{"type": "function", "function": function} for function in functions]
        return DrawnRequest("message", MESSAGES, _message_body(chat), chat=chat)


def streamed_completion(max_tokens: int, **fields: Any) -> DrawnRequest:
    """A streamed completion of one prompt token, with its usage at the end."""
    return DrawnRequest("completion", COMPLETIONS, {**_streamed("base", max_tokens), "prompt": [5], **fields})


def long_predicted(dice: random.Random) -> DrawnRequest:
    """A streamed chat of `x` and `y` without a limit, with a prediction that is right in part."""
    text = "".join(dice.choices("xy", (9, 1), k=6000))
    fields = {"logit_bias": {str(LIKELY): 12.0, str(RARE): dice.choice((2.0, 7.0))}}
    body = {**_streamed("base", 0), "messages": [{"role": "user", "content": "?"}], **fields}
    del body["max_tokens"]
    return DrawnRequest("predicted", CHAT, {**body, "prediction": {"type": "content", "content": text}})


class RequestDraw:
    """Draws requests of all kinds. Without `with_refusals`, no request must be refused."""

    def __init__(self, dice: random.Random, *, with_refusals: bool = True) -> None:
        self._dice = dice
        self._with_refusals = with_refusals

    def draw(self, max_tokens: int) -> DrawnRequest:
        dice = self._dice
        if self._with_refusals and dice.random() < 0.08:
            return self._refused(max_tokens)
        kinds = {
            self._completion: 3,
            self._scored: 2,
            self._plain: 2,
            self._several: 2,
            self._tools: 4,
            self._history: 2,
            self._thinking: 2,
            self._constrained: 2,
            self._repetitive: 6,
            self._embedding: 1,
        }
        drawn = dice.choices([*kinds], [*kinds.values()])[0](max_tokens)
        if drawn.path == CHAT and dice.random() < 0.1:
            return drawn.as_tokenize()
        endpoints = (drawn, drawn.as_response(), drawn.as_message())
        chosen = dice.choices(endpoints, (4, 3, 3))[0]
        return chosen.as_stored() if dice.random() < 0.3 else chosen

    def _embedding(self, max_tokens: int) -> DrawnRequest:
        dice = self._dice
        prompt = [5] * dice.randint(1, 300)
        return DrawnRequest("embedding", EMBEDDINGS, {"model": dice.choice(("base", "plain")), "input": prompt})

    def _completion(self, max_tokens: int) -> DrawnRequest:
        constraints: list[dict[str, Any]] = [
            {},
            {"guided_json": PERSON},
            {"guided_regex": f"x{self._dice.randrange(50)}[0-9]*"},
            {"guided_choice": ["yes, by all means and in every way", "no, by no means and in no way"]},
            {"guided_regex": "[a-z ]{60,300}"},
        ]
        return streamed_completion(max_tokens, **self._dice.choices(constraints, (4, 1, 1, 1, 1))[0])

    def _scored(self, max_tokens: int) -> DrawnRequest:
        fields: dict[str, Any] = self._dice.choice(
            (
                {"best_of": 3, **_WHOLE},
                {"n": 2, "best_of": 3, "logprobs": 2, **_WHOLE},
                {"n": 3, "echo": True},
                {"echo": True, "logprobs": 1, **_WHOLE},
                {"n": 2, "prompt_logprobs": 1, **_WHOLE},
                {"n": 2, **_STOPS},
            )
        )
        drawn = streamed_completion(max_tokens, **fields)
        return DrawnRequest("scored", drawn.path, _without_nulls(drawn.body))

    def _several(self, max_tokens: int) -> DrawnRequest:
        fields: dict[str, Any] = self._dice.choice(
            (
                {"n": 3},
                {"n": 2, "prompt_logprobs": 2, **_WHOLE},
                {"n": 2, **_STOPS},
                {"n": 2, "tools": _TOOLS, **_STOPS},
            )
        )
        drawn = self._chat("several", self._dice.choice(TOOL_MODELS), max_tokens, [self._question()], **fields)
        return DrawnRequest(drawn.kind, drawn.path, _without_nulls(drawn.body))

    def _plain(self, max_tokens: int) -> DrawnRequest:
        model = self._dice.choice(("base", "plain", "caller", "quiet", "strict"))
        return self._chat("plain", model, max_tokens, [self._question()])

    def _tools(self, max_tokens: int) -> DrawnRequest:
        dice = self._dice
        tools = dice.sample(_TOOLS, dice.randint(1, len(_TOOLS)))
        named = {"type": "function", "function": {"name": dice.choice(tools)["function"]["name"]}}
        kind, choice = dice.choice((("auto", "auto"), ("required", "required"), ("named", named), ("none", "none")))
        fields: dict[str, Any] = {"tools": tools, "tool_choice": choice}
        if dice.random() < 0.2:
            fields["parallel_tool_calls"] = False
        return self._chat(f"tools {kind}", dice.choice(TOOL_MODELS), max_tokens, [self._question()], **fields)

    def _history(self, max_tokens: int) -> DrawnRequest:
        dice = self._dice
        messages: list[dict[str, Any]] = [{"role": "system", "content": "Be brief."}]
        for turn in range(dice.randint(1, 4)):
            arguments = json.dumps({"city": f"{dice.choice(('Rome', 'Oslo', 'Łódź'))} {turn}"}, ensure_ascii=False)
            function = {"name": "get_weather_of_city", "arguments": arguments}
            call = {"id": f"call_{turn}", "type": "function", "function": function}
            messages += [
                self._question(),
                {"role": "assistant", "content": dice.choice((None, *_ANSWERS)), "tool_calls": [call]},
                {"role": "tool", "tool_call_id": call["id"], "content": f"{dice.randrange(40)} °C"},
            ]
        fields: dict[str, Any] = {"tools": _TOOLS[:1]}
        if dice.random() < 0.3:
            messages.append({"role": "assistant", "content": "It is"})
            fields |= {"continue_final_message": True, "add_generation_prompt": False}
        return self._chat("history", dice.choice(TOOL_MODELS), max_tokens, messages, **fields)

    def _thinking(self, max_tokens: int) -> DrawnRequest:
        dice = self._dice
        fields = dice.choice(
            (
                {"chat_template_kwargs": {"enable_thinking": dice.random() < 0.5}},
                {"reasoning_effort": dice.choice(("none", "low"))},
                {"tools": _TOOLS, "tool_choice": "required", "chat_template_kwargs": {"enable_thinking": True}},
                {"thinking_token_budget": dice.randrange(6), "n": 2},
                {"thinking_token_budget": 0, "tools": _TOOLS, "tool_choice": "required"},
            )
        )
        return self._chat("thinking", dice.choice(TOOL_MODELS), max_tokens, [self._question()], **fields)

    def _constrained(self, max_tokens: int) -> DrawnRequest:
        schema = {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON, "strict": True}}
        return self._chat(
            "constrained", self._dice.choice(TOOL_MODELS), max_tokens, [self._question()], response_format=schema
        )

    def _repetitive(self, max_tokens: int) -> DrawnRequest:
        """An answer of `x` and `y`, which is drafted from its text, or from a prediction that is right in part."""
        dice = self._dice
        fields: dict[str, Any] = {"logit_bias": {str(LIKELY): 12.0, **dice.choice(_UNLIKE_BIASES)}}
        more: dict[str, Any] = dice.choices(({}, {"n": 2}, _WHOLE, {"stop": ["yyx"], "user": STOPPING}), (4, 1, 1, 2))[
            0
        ]
        fields |= more
        if dice.random() < 0.2:
            drawn = streamed_completion(max_tokens, **fields)
        else:
            if dice.random() < 0.7:
                text = "".join(dice.choices("xy", (9, 1), k=dice.randint(1, 2 * max_tokens)))
                fields["prediction"] = {"type": "content", "content": text}
            drawn = self._chat("", dice.choice(TOOL_MODELS), max_tokens, [self._question()], **fields)
        kind = "predicted" if "prediction" in fields else "repetitive"
        return DrawnRequest(kind, drawn.path, _without_nulls(drawn.body))

    def _refused(self, max_tokens: int) -> DrawnRequest:
        question = self._question()
        refused = [
            ("base", [question], {"tools": _TOOLS, "tool_choice": {"type": "function", "function": {"name": "f"}}}),
            ("base", [{"role": "tool", "tool_call_id": "none", "content": "x"}], {}),
            ("caller", [question], {"chat_template_kwargs": {"messages": []}}),
            ("quiet", [question], {"tools": _TOOLS}),
            ("strict", [question, {"role": "assistant", "content": "It is"}, question], {}),
            ("plain", [question], {"guided_json": {"type": "array", "contains": {"type": "null"}}}),
        ]
        model, messages, fields = self._dice.choice(refused)
        drawn = self._chat("refused", model, max_tokens, messages, **fields)
        return DrawnRequest(drawn.kind, drawn.path, drawn.body, is_refused=True)

    def _question(self) -> dict[str, Any]:
        words = self._dice.choices(
            ("How", "is", "the weather", "in Rome", "today", "🦊", "?"), k=self._dice.randint(1, 9)
        )
        return {"role": "user", "content": " ".join(words)}

    def _chat(
        self, kind: str, model: str, max_tokens: int, messages: list[dict[str, Any]], **fields: Any
    ) -> DrawnRequest:
        return DrawnRequest(kind, CHAT, {**_streamed(model, max_tokens), "messages": messages, **fields})


_WHOLE = {"stream": None, "stream_options": None}
"""The fields of a request without streaming."""


_SAME = frozenset(
    {"model", "ignore_eos", "stream", "stop", "user", "chat_template_kwargs", "parallel_tool_calls", "logit_bias"}
)
"""The fields that `/v1/responses` and chat requests have in common."""

_IN_RESPONSES = _SAME | {
    "max_tokens",
    "messages",
    "reasoning_effort",
    "response_format",
    "stream_options",
    "tool_choice",
    "tools",
}


def _response_body(chat: dict[str, Any]) -> dict[str, Any]:
    body = {name: value for name, value in chat.items() if name in _SAME}
    body |= {"input": list(_items(chat["messages"])), "max_output_tokens": chat["max_tokens"]}
    if "tools" in chat:
        body["tools"] = [{"type": "function", **tool["function"]} for tool in chat["tools"]]
    if "tool_choice" in chat:
        choice = chat["tool_choice"]
        body["tool_choice"] = choice if isinstance(choice, str) else {"type": "function", **choice["function"]}
    if "reasoning_effort" in chat:
        body["reasoning"] = {"effort": chat["reasoning_effort"]}
    if "response_format" in chat:
        body["text"] = {"format": {"type": "json_schema", **chat["response_format"]["json_schema"]}}
    return body


def _items(messages: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    for message in messages:
        if message["role"] == "tool":
            yield {
                "type": "function_call_output",
                "call_id": message["tool_call_id"],
                "output": message["content"],
            }
            continue
        if message["content"] is not None:
            yield {"role": message["role"], "content": message["content"]}
        for call in message.get("tool_calls", ()):
            yield {"type": "function_call", "call_id": call["id"], **call["function"]}


_IN_MESSAGES = _IN_RESPONSES - {"chat_template_kwargs", "logit_bias", "reasoning_effort"}


def _message_body(chat: dict[str, Any]) -> dict[str, Any]:
    system = [message["content"] for message in chat["messages"] if message["role"] == "system"]
    body: dict[str, Any] = {name: chat[name] for name in ("model", "max_tokens", "stream") if name in chat}
    body |= {"messages": list(_turns(chat["messages"])), "stop_sequences": chat.get("stop")}
    body |= {"system": "\n".join(system) or None, "metadata": {"user_id": chat.get("user")}}
    if "tools" in chat:
        body["tools"] = [_message_tool(tool["function"]) for tool in chat["tools"]]
    choice = chat.get("tool_choice", "auto")
    asked = {"type": {"required": "any"}.get(choice, choice)} if isinstance(choice, str) else {"type": "tool"}
    if isinstance(choice, dict):
        asked["name"] = choice["function"]["name"]
    if chat.get("parallel_tool_calls") is False and choice != "none":
        asked["disable_parallel_tool_use"] = True
    if "tools" in chat:
        body["tool_choice"] = asked
    if "response_format" in chat:
        schema = chat["response_format"]["json_schema"]["schema"]
        body["output_config"] = {"format": {"type": "json_schema", "schema": schema}}
    return body


def _message_tool(function: dict[str, Any]) -> dict[str, Any]:
    tool = {name: value for name, value in function.items() if name != "parameters"}
    return {**tool, "input_schema": function["parameters"]}


def _turns(messages: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    for message in messages:
        if message["role"] == "tool":
            result = {"type": "tool_result", "tool_use_id": message["tool_call_id"], "content": message["content"]}
            yield {"role": "user", "content": [result]}
        elif message["role"] != "system":
            texts = [{"type": "text", "text": message["content"]}] if message["content"] is not None else []
            calls = [
                {
                    "type": "tool_use",
                    "id": call["id"],
                    "name": call["function"]["name"],
                    "input": json.loads(call["function"]["arguments"]),
                }
                for call in message.get("tool_calls", ())
            ]
            yield {"role": message["role"], "content": [*texts, *calls]}


def _without_nulls(body: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in body.items() if value is not None}


def _streamed(model: str, max_tokens: int) -> dict[str, Any]:
    return {
        "model": model,
        "max_tokens": max_tokens,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
