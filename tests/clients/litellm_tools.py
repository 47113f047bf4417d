from __future__ import annotations

import json
import os
from importlib.metadata import version
from typing import Any

import litellm

QUESTION: Any = {"role": "user", "content": "What is the weather in Rome?"}
TOOL: Any = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "strict": True,
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "enum": ["Paris", "Rome"]}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}
CHAT: Any = {
    "model": f"openai/{os.environ['CLIENT_TOOL_MODEL']}",
    "temperature": 0,
    "max_tokens": 64,
    "reasoning_effort": "none",
    "tools": [TOOL],
    "api_base": os.environ["CLIENT_URL"],
    "api_key": os.environ["CLIENT_KEY"],
}
FORCED: Any = {**CHAT, "tool_choice": {"type": "function", "function": {"name": "get_weather"}}}


def loop(asked: Any, choice: Any = "none") -> dict[str, Any]:
    (call,) = asked.tool_calls
    result = {"role": "tool", "tool_call_id": call.id, "content": "sunny"}
    answer = litellm.completion(**CHAT, messages=[QUESTION, asked, result], tool_choice=choice)
    return {
        "name": call.function.name,
        "arguments": json.loads(call.function.arguments),
        "content": asked.content or None,
        "answer": answer.choices[0].message.content,
        "usage": answer.usage.total_tokens,
    }


def main() -> None:
    chunks = list(litellm.completion(**FORCED, messages=[QUESTION], stream=True))
    free = litellm.completion(**CHAT, messages=[QUESTION])
    whole = litellm.completion(**FORCED, messages=[QUESTION])
    streamed = litellm.stream_chunk_builder(chunks, messages=[QUESTION])
    found = {
        "version": version("litellm"),
        "auto": loop(free.choices[0].message, "auto"),
        "whole": loop(whole.choices[0].message),
        "streamed": {**loop(streamed.choices[0].message), "is streamed": len(chunks) > 3},
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
