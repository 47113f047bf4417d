from __future__ import annotations

import json
import os
from importlib.metadata import version
from typing import Any, Literal

import openai
from pydantic import BaseModel

QUESTION: Any = {"role": "user", "content": "What is the weather in Rome?"}


class GetWeather(BaseModel):
    """Tell the weather in a city."""

    city: Literal["Paris", "Rome"]


TOOL = openai.pydantic_function_tool(GetWeather, name="get_weather")
CHAT: Any = {
    "model": os.environ["CLIENT_TOOL_MODEL"],
    "temperature": 0,
    "max_tokens": 64,
    "reasoning_effort": "none",
    "tools": [TOOL],
}
FORCED: Any = {**CHAT, "tool_choice": {"type": "function", "function": {"name": "get_weather"}}}


def loop(client: openai.OpenAI, asked: Any, choice: Any = "none") -> dict[str, Any]:
    """Answer the call in a message with a result. Return the call and the final answer."""
    (call,) = asked.tool_calls
    result = {"role": "tool", "tool_call_id": call.id, "content": "sunny"}
    history: Any = [QUESTION, asked, result]
    answer = client.chat.completions.create(**CHAT, messages=history, tool_choice=choice)
    return {
        "name": call.function.name,
        "arguments": json.loads(call.function.arguments),
        "content": asked.content,
        "answer": answer.choices[0].message.content,
        "usage": answer.usage and answer.usage.total_tokens,
    }


def main() -> None:
    client = openai.OpenAI(base_url=os.environ["CLIENT_URL"], api_key=os.environ["CLIENT_KEY"], max_retries=0)
    free = client.chat.completions.create(**CHAT, messages=[QUESTION])
    whole = client.chat.completions.create(**FORCED, messages=[QUESTION])
    parsed = client.chat.completions.parse(**FORCED, messages=[QUESTION]).choices[0].message
    with client.chat.completions.stream(**FORCED, messages=[QUESTION]) as stream:
        events = list(stream)
        streamed = stream.get_final_completion()
    deltas = [event for event in events if event.type == "tool_calls.function.arguments.delta"]
    done = [event for event in events if event.type == "tool_calls.function.arguments.done"]
    assert parsed.tool_calls
    assert isinstance(parsed.tool_calls[0].function.parsed_arguments, GetWeather)
    found = {
        "version": version("openai"),
        "reason": whole.choices[0].finish_reason,
        "streamed reason": streamed.choices[0].finish_reason,
        "auto": loop(client, free.choices[0].message, "auto"),
        "whole": loop(client, whole.choices[0].message),
        "parsed": loop(client, parsed),
        "streamed": loop(client, streamed.choices[0].message),
        "deltas are the arguments": "".join(event.arguments_delta for event in deltas) == done[0].arguments,
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
