from __future__ import annotations

import json
import os
from importlib.metadata import version
from typing import Any, Literal

from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI

QUESTION = HumanMessage("What is the weather in Rome?")


@tool
def get_weather(city: Literal["Paris", "Rome"]) -> str:
    """Tell the weather in a city."""
    return "sunny"


MODEL = ChatOpenAI(
    model=os.environ["CLIENT_TOOL_MODEL"],
    base_url=os.environ["CLIENT_URL"],
    api_key=os.environ["CLIENT_KEY"],
    temperature=0,
    max_tokens=64,
    reasoning_effort="none",
    max_retries=0,
    stream_usage=True,
)
FORCED = MODEL.bind_tools([get_weather], tool_choice="get_weather", strict=True)
AUTO = MODEL.bind_tools([get_weather])
TEXT = MODEL.bind_tools([get_weather], tool_choice="none", strict=True)


def loop(asked: Any, last: Any = TEXT) -> dict[str, Any]:
    (call,) = asked.tool_calls
    result = get_weather.invoke(call)
    assert isinstance(result, ToolMessage)
    answer = last.invoke([QUESTION, asked, result])
    return {
        "name": call["name"],
        "arguments": call["args"],
        "content": asked.content or None,
        "answer": answer.content,
        "usage": answer.usage_metadata and answer.usage_metadata["total_tokens"],
    }


def main() -> None:
    chunks = list(FORCED.stream([QUESTION]))
    joined = chunks[0]
    for chunk in chunks[1:]:
        joined = joined + chunk
    found = {
        "version": version("langchain-openai"),
        "auto": loop(AUTO.invoke([QUESTION]), AUTO),
        "whole": loop(FORCED.invoke([QUESTION])),
        "streamed": {**loop(joined), "is streamed": len(chunks) > 3},
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
