from __future__ import annotations

import asyncio
import json
import os
from importlib.metadata import version
from typing import Any, Literal

from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_default_openai_client,
    set_tracing_disabled,
)
from openai import AsyncOpenAI
from openai.types.shared import Reasoning

given: list[str] = []


@function_tool
def get_weather(city: Literal["Paris", "Rome"]) -> str:
    """Tell the weather in a city."""
    given.append(city)
    return "sunny"


async def whole(agent: Agent[Any]) -> dict[str, Any]:
    result = await Runner.run(agent, "What is the weather in Rome?", max_turns=3)
    return {"turns": len(result.raw_responses), "answer": result.final_output}


async def streamed(agent: Agent[Any]) -> dict[str, Any]:
    result = Runner.run_streamed(agent, "What is the weather in Rome?", max_turns=3)
    kinds = [event.type async for event in result.stream_events()]
    return {
        "turns": len(result.raw_responses),
        "answer": result.final_output,
        "is streamed": kinds.count("raw_response_event") > 6,
    }


async def main() -> None:
    set_tracing_disabled(True)
    client = AsyncOpenAI(base_url=os.environ["CLIENT_URL"], api_key=os.environ["CLIENT_KEY"], max_retries=0)
    found: dict[str, Any] = {"version": version("openai-agents")}
    set_default_openai_client(client, use_for_tracing=False)
    model = os.environ["CLIENT_TOOL_MODEL"]
    models = {
        # A name alone: the framework calls the Responses API. It takes what is before a slash for a provider.
        "default": model.rpartition("/")[2],
        "responses": OpenAIResponsesModel(model=model, openai_client=client),
        "chat": OpenAIChatCompletionsModel(model=model, openai_client=client),
    }
    for name, chosen in models.items():
        agent: Agent[Any] = Agent(
            name="Weather",
            instructions="Answer briefly.",
            model=chosen,
            model_settings=ModelSettings(
                temperature=0, max_tokens=64, reasoning=Reasoning(effort="none"), include_usage=True
            ),
            tools=[get_weather],
        )
        found[name] = {"whole": await whole(agent), "streamed": await streamed(agent)}
    print(json.dumps({**found, "given": given}))


if __name__ == "__main__":
    asyncio.run(main())
