from __future__ import annotations

import json
import os
from importlib.metadata import version
from typing import Any, Literal

from langchain_anthropic import ChatAnthropic
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool

QUESTION = HumanMessage("What is the weather in Rome?")


@tool
def get_weather(city: Literal["Paris", "Rome"]) -> str:
    """Tell the weather in a city."""
    return "sunny"


MODEL = ChatAnthropic(
    model=os.environ["CLIENT_TOOL_MODEL"],
    base_url=os.environ["CLIENT_URL"].removesuffix("/v1"),
    api_key=os.environ["CLIENT_KEY"],
    max_tokens=200,
    # The client for the newer version of the API has no field for it.
    model_kwargs={"extra_body": {"temperature": 0}},
    max_retries=0,
)
AUTO = MODEL.bind_tools([get_weather])
FORCED = MODEL.bind_tools([get_weather], tool_choice="get_weather")


def loop(asked: Any) -> dict[str, Any]:
    (call,) = asked.tool_calls
    result = get_weather.invoke(call)
    assert isinstance(result, ToolMessage)
    answer = AUTO.invoke([QUESTION, asked, result])
    return {"call": [call["name"], call["args"]], "answer": answer.text, "usage": answer.usage_metadata["total_tokens"]}


def main() -> None:
    chunks = list(FORCED.stream([QUESTION]))
    joined = chunks[0]
    for chunk in chunks[1:]:
        joined = joined + chunk
    found = {
        "version": version("langchain-anthropic"),
        "whole": loop(FORCED.invoke([QUESTION])),
        "streamed": {**loop(joined), "is streamed": len(chunks) > 3},
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
