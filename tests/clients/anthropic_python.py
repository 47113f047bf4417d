from __future__ import annotations

import asyncio
import json
import os
from importlib.metadata import version
from typing import Any

import anthropic
from anthropic import Anthropic, AsyncAnthropic

URL, KEY, LIMITED_KEY, MODEL = (
    os.environ[name] for name in ("CLIENT_URL", "CLIENT_KEY", "CLIENT_LIMITED_KEY", "CLIENT_TOOL_MODEL")
)
ROOT = URL.removesuffix("/v1")
QUESTION = {"role": "user", "content": "What is the weather in Rome?"}
CITY = {"type": "string", "enum": ["Paris", "Rome"]}
WEATHER: Any = {
    "name": "get_weather",
    "description": "Tell the weather in a city.",
    "input_schema": {"type": "object", "properties": {"city": CITY}, "required": ["city"]},
    "cache_control": {"type": "ephemeral"},
}
ASKED: Any = {
    "model": MODEL,
    "max_tokens": 200,
    "messages": [QUESTION],
    "tools": [WEATHER],
    "extra_body": {"temperature": 0},
}


def client(api_key: str = KEY, max_retries: int = 0) -> Anthropic:
    return Anthropic(base_url=ROOT, api_key=api_key, max_retries=max_retries)


def answered(call: Any, **fields: Any) -> Any:
    """Ask again with the result of a message's call."""
    [use] = [block for block in call.content if block.type == "tool_use"]
    result = {"type": "tool_result", "tool_use_id": use.id, "content": "sunny"}
    messages = [QUESTION, {"role": "assistant", "content": call.content}, {"role": "user", "content": [result]}]
    return client().messages.create(**{**ASKED, "messages": messages}, **fields)


def shown(message: Any) -> dict[str, Any]:
    [use] = [block for block in message.content if block.type == "tool_use"] or [None]
    usage = message.usage
    return {
        "blocks": [block.type for block in message.content],
        "reason": message.stop_reason,
        "call": use and [use.name, use.input],
        "text": "".join(block.text for block in message.content if block.type == "text"),
        "usage": usage.input_tokens + usage.cache_read_input_tokens + usage.output_tokens,
    }


def loop(**fields: Any) -> dict[str, Any]:
    whole = client().messages.create(**ASKED, **fields)
    with client().messages.stream(**ASKED, **fields) as stream:
        kinds = [event.type for event in stream]
        streamed = stream.get_final_message()
    return {
        "whole": shown(whole),
        "streamed": shown(streamed),
        "is streamed": len(kinds) > 5,
        "answer": shown(answered(streamed, **fields)),
    }


def refusal(call: Any, kind: type[anthropic.APIStatusError]) -> list[Any]:
    try:
        call()
    except kind as error:
        body: Any = error.body
        return [type(error).__name__, error.status_code, body["error"]["type"], bool(error.request_id)]
    return ["nothing was raised"]


def limits() -> dict[str, Any]:
    for _ in range(8):
        try:
            client(LIMITED_KEY).messages.create(**ASKED)
        except anthropic.RateLimitError as error:
            return {"status": error.status_code, "retry after": 0 < int(error.response.headers["retry-after"]) <= 60}
    return {"status": "never limited"}


async def together() -> list[Any]:
    async with AsyncAnthropic(base_url=ROOT, api_key=KEY, max_retries=0) as many:
        return [shown(one) for one in await asyncio.gather(*(many.messages.create(**ASKED) for _ in range(4)))]


def leave() -> bool:
    """If a client disconnects mid-stream, the server has to end the request by itself."""
    with client().messages.create(**{**ASKED, "max_tokens": 2000}, stream=True) as stream:
        return next(iter(stream)).type == "message_start"


def main() -> None:
    plain = client()
    format_: Any = {"type": "json_schema", "schema": {"type": "object", "properties": {"city": CITY}}}
    format_["schema"] |= {"required": ["city"], "additionalProperties": False}
    no_tools = {**ASKED, "tools": [], "max_tokens": 60}
    structured = plain.messages.create(**no_tools, output_config={"format": format_})
    bearer = Anthropic(base_url=ROOT, auth_token=KEY, max_retries=0).messages.create(**ASKED)
    brief = plain.messages.create(**ASKED, thinking={"type": "enabled", "budget_tokens": 5})
    old = plain.messages.create(**ASKED, extra_headers={"anthropic-version": "2023-06-01", "x-api-key": KEY})
    counted = plain.messages.count_tokens(model=MODEL, messages=ASKED["messages"], tools=[WEATHER])
    found = {
        "version": version("anthropic"),
        "plain": loop(),
        "thinking": loop(thinking={"type": "adaptive"}),
        "budget": brief.usage.output_tokens_details and brief.usage.output_tokens_details.thinking_tokens,
        "forced": loop(tool_choice={"type": "tool", "name": "get_weather"})["streamed"],
        "none": shown(plain.messages.create(**ASKED, tool_choice={"type": "none"})),
        "structured": json.loads(shown(structured)["text"]),
        "bearer": shown(bearer),
        "old version": shown(old),
        "together": asyncio.run(together()),
        "models": sorted(model.id for model in plain.models.list(limit=1)),
        "model": plain.models.retrieve(MODEL).id,
        "count": counted.input_tokens + bearer.usage.output_tokens,
        "left": leave(),
        "unknown model": refusal(
            lambda: plain.messages.create(**{**ASKED, "model": "nobody/nothing"}), anthropic.NotFoundError
        ),
        "wrong key": refusal(lambda: client("wrong").messages.create(**ASKED), anthropic.AuthenticationError),
        "wrong call": refusal(lambda: plain.messages.create(**ASKED, stop_sequences=[""]), anthropic.BadRequestError),
        "limit": limits(),
        "retries": len([client(LIMITED_KEY, 5).messages.create(**ASKED) for _ in range(3)]),
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
