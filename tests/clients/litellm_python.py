from __future__ import annotations

import asyncio
import json
import os
from importlib.metadata import version
from typing import Any, Literal

import litellm
from pydantic import BaseModel

URL, KEY, LIMITED_KEY, MODEL = (
    os.environ[name] for name in ("CLIENT_URL", "CLIENT_KEY", "CLIENT_LIMITED_KEY", "CLIENT_MODEL")
)
CHAT: Any = {
    "model": f"openai/{MODEL}",
    "messages": [{"role": "user", "content": "What is the capital of France?"}],
    "temperature": 0,
    "max_tokens": 48,
    "api_base": URL,
    "api_key": KEY,
}


class Fact(BaseModel):
    """The fields of a structured answer."""

    city: Literal["Paris", "Rome"]
    is_capital: bool


def refusal(call: Any, kind: type[Exception]) -> list[Any]:
    try:
        call()
    except kind as error:
        return [type(error).__name__, getattr(error, "status_code", None)]
    return ["nothing was raised"]


def flood() -> None:
    for _ in range(8):
        litellm.completion(**{**CHAT, "api_key": LIMITED_KEY}, num_retries=0)


def joined(chunks: Any) -> dict[str, Any]:
    text, usage, num_chunks = "", None, 0
    for chunk in chunks:
        num_chunks += 1
        text += "".join(choice.delta.content or "" for choice in chunk.choices)
        usage = getattr(chunk, "usage", None) or usage
    return {"text": text, "usage": usage and usage.total_tokens, "is streamed": num_chunks > 3}


async def together() -> list[str]:
    answers = await asyncio.gather(*(litellm.acompletion(**CHAT) for _ in range(4)))
    return [answer.choices[0].message.content for answer in answers]


def main() -> None:
    answer = litellm.completion(**CHAT)
    probable = litellm.completion(**CHAT, logprobs=True, top_logprobs=2)
    several = litellm.completion(**{**CHAT, "temperature": 1.5}, n=3, seed=7)
    stopped = litellm.completion(**CHAT, stop=["capital"])
    text = litellm.text_completion(
        model=f"text-completion-openai/{MODEL}",
        prompt="The capital of",
        max_tokens=8,
        temperature=0,
        api_base=URL,
        api_key=KEY,
    )
    found = {
        "version": version("litellm"),
        "text": answer.choices[0].message.content,
        "reason": answer.choices[0].finish_reason,
        "usage": answer.usage.total_tokens,
        "stream": joined(litellm.completion(**CHAT, stream=True)),
        "stream with usage": joined(litellm.completion(**CHAT, stream=True, stream_options={"include_usage": True})),
        "logprobs": "".join(token["token"] for token in probable.choices[0].logprobs["content"]),
        "n": sorted(choice.index for choice in several.choices),
        "stop": [stopped.choices[0].message.content, stopped.choices[0].finish_reason],
        "completion": text.choices[0].text,
        "structured": json.loads(litellm.completion(**CHAT, response_format=Fact).choices[0].message.content),
        "together": asyncio.run(together()),
        "unknown model": refusal(
            lambda: litellm.completion(**{**CHAT, "model": "openai/nobody/nothing"}), litellm.NotFoundError
        ),
        "wrong key": refusal(lambda: litellm.completion(**{**CHAT, "api_key": "wrong"}), litellm.AuthenticationError),
        "wrong call": refusal(lambda: litellm.completion(**{**CHAT, "temperature": 9}), litellm.BadRequestError),
        "limit": refusal(flood, litellm.RateLimitError),
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
