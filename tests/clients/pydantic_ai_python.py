from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import Callable
from importlib.metadata import version
from typing import Any, Literal

from openai import AsyncOpenAI
from pydantic import BaseModel
from pydantic_ai import Agent, ModelHTTPError, ModelSettings, NativeOutput
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider

KEY, LIMITED_KEY, MODEL = (os.environ[name] for name in ("CLIENT_KEY", "CLIENT_LIMITED_KEY", "CLIENT_TOOL_MODEL"))
SETTINGS = ModelSettings(temperature=0, max_tokens=128)


class Fact(BaseModel):
    """The fields of a structured answer."""

    city: Literal["Paris", "Rome"]
    is_capital: bool


def provider(key: str = KEY, num_retries: int = 0) -> OpenAIProvider:
    client = AsyncOpenAI(base_url=os.environ["CLIENT_URL"], api_key=key, max_retries=num_retries)
    return OpenAIProvider(openai_client=client)


async def surface(make: Callable[..., Any], given: list[str]) -> dict[str, Any]:
    model = make(MODEL, provider=provider())
    agent: Agent = Agent(model, model_settings=SETTINGS)

    @agent.tool_plain
    def get_weather(city: Literal["Paris", "Rome"]) -> str:
        """Tell the weather in a city."""
        given.append(city)
        return "sunny"

    whole = await agent.run("What is the weather in Rome?")
    async with agent.run_stream("What is the weather in Rome?") as stream:
        parts = [part async for part in stream.stream_text(delta=True, debounce_by=None)]
    following = await agent.run("Who are you?", message_history=whole.all_messages())
    parsed = await Agent(model, model_settings=SETTINGS, output_type=NativeOutput(Fact)).run("The capital of France?")
    return {
        "whole": {"answer": whole.output, "usage": whole.usage.total_tokens},
        "streamed": {"answer": "".join(parts), "usage": stream.usage.total_tokens, "is streamed": len(parts) > 3},
        "next": following.output,
        "structured": parsed.output.city,
    }


async def refused(name: str, key: str = KEY) -> int | None:
    try:
        await Agent(OpenAIChatModel(name, provider=provider(key))).run("Hi")
    except ModelHTTPError as error:
        return error.status_code
    return None


async def waited() -> bool:
    """Send two requests with a retrying client under a limit of one request per five seconds."""
    agent: Agent = Agent(OpenAIChatModel(MODEL, provider=provider(LIMITED_KEY, 4)), model_settings=SETTINGS)
    begun = time.monotonic()
    for _ in range(2):
        await agent.run("Hi")
    return time.monotonic() - begun > 4


async def main() -> None:
    given: list[str] = []
    found: dict[str, Any] = {
        "version": version("pydantic-ai-slim"),
        "chat": await surface(OpenAIChatModel, given),
        "responses": await surface(OpenAIResponsesModel, given),
        "given": given,
        "errors": [await refused("nothing"), await refused(MODEL, "wrong")],
        "waited": await waited(),
    }
    print(json.dumps(found))


if __name__ == "__main__":
    asyncio.run(main())
