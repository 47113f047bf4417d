from __future__ import annotations

import asyncio
import json
import os
from importlib.metadata import version
from typing import Any

import litellm

QUESTION = {"role": "user", "content": "What is the weather in Rome?"}
CITY = {"type": "string", "enum": ["Paris", "Rome"]}
SCHEMA = {"type": "object", "properties": {"city": CITY}, "required": ["city"]}
WEATHER = {"name": "get_weather", "description": "Tell the weather in a city.", "parameters": SCHEMA}
CHAT: Any = {
    "model": f"anthropic/{os.environ['CLIENT_TOOL_MODEL']}",
    "messages": [QUESTION],
    "tools": [{"type": "function", "function": WEATHER}],
    "temperature": 0,
    "max_tokens": 200,
    "api_base": os.environ["CLIENT_URL"].removesuffix("/v1"),
    "api_key": os.environ["CLIENT_KEY"],
}


def loop(message: Any) -> dict[str, Any]:
    [call] = message.tool_calls
    result = {"role": "tool", "tool_call_id": call.id, "content": "sunny"}
    answer = litellm.completion(**{**CHAT, "messages": [QUESTION, message, result]})
    return {
        "call": [call.function.name, json.loads(call.function.arguments)],
        "answer": answer.choices[0].message.content,
        "usage": answer.usage.total_tokens,
    }


async def passed_through() -> dict[str, Any]:
    """Call litellm's own Messages API, which hands the body on."""
    tool = {"name": "get_weather", "description": "Tell the weather in a city.", "input_schema": SCHEMA}
    answer: Any = await litellm.anthropic_messages(**{**CHAT, "tools": [tool]})
    [use] = [block for block in answer["content"] if block["type"] == "tool_use"]
    return {"call": [use["name"], use["input"]], "reason": answer["stop_reason"]}


def main() -> None:
    chunks = list(litellm.completion(**CHAT, stream=True))
    joined: Any = litellm.stream_chunk_builder(chunks)
    found = {
        "version": version("litellm"),
        "whole": loop(litellm.completion(**CHAT).choices[0].message),
        "streamed": {**loop(joined.choices[0].message), "is streamed": len(chunks) > 3},
        "passed through": asyncio.run(passed_through()),
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
