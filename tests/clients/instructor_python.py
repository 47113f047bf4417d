from __future__ import annotations

import json
import os
from importlib.metadata import version
from typing import Any, Literal

import instructor
import openai
from pydantic import BaseModel, ConfigDict, Field

URL, KEY, MODEL = (os.environ[name] for name in ("CLIENT_URL", "CLIENT_KEY", "CLIENT_MODEL"))
CHAT: Any = {
    "model": MODEL,
    "messages": [{"role": "user", "content": "What is the capital of France?"}],
    "temperature": 0,
    "max_tokens": 200,
    "max_retries": 0,
}


class Person(BaseModel):
    model_config = ConfigDict(extra="forbid")

    name: str = Field(max_length=12)
    age: int = Field(ge=0, le=150)


class Fact(BaseModel):
    """The fields of a structured answer."""

    model_config = ConfigDict(extra="forbid")

    city: Literal["Paris", "Rome"]
    is_capital: bool
    mayors: list[Person] = Field(max_length=2)


def main() -> None:
    client = instructor.from_openai(openai.OpenAI(base_url=URL, api_key=KEY), mode=instructor.Mode.JSON_SCHEMA)
    parts = [part.model_dump() for part in client.chat.completions.create_partial(response_model=Fact, **CHAT)]
    whole, completion = client.chat.completions.create_with_completion(response_model=Fact, **CHAT)
    found = {
        "version": version("instructor"),
        "structured": whole.model_dump(),
        "parts": len(parts),
        "last part": parts[-1],
        "usage": completion.usage.total_tokens,
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
