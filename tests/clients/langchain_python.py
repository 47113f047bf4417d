from __future__ import annotations

import asyncio
import json
import os
from importlib.metadata import version
from typing import Any, Literal

import openai
from langchain_core.messages import HumanMessage, SystemMessage
from langchain_openai import ChatOpenAI, OpenAI
from pydantic import BaseModel

URL, KEY, LIMITED_KEY, MODEL = (
    os.environ[name] for name in ("CLIENT_URL", "CLIENT_KEY", "CLIENT_LIMITED_KEY", "CLIENT_MODEL")
)
QUESTION = "What is the capital of France?"


def chat(**options: Any) -> ChatOpenAI:
    given: dict[str, Any] = {"model": MODEL, "base_url": URL, "api_key": KEY, "temperature": 0, "max_tokens": 48}
    return ChatOpenAI(**{**given, "max_retries": 0, **options})


class Fact(BaseModel):
    """The fields of a structured answer."""

    city: Literal["Paris", "Rome"]
    is_capital: bool


def refusal(call: Any, kind: type[openai.APIStatusError]) -> list[Any]:
    try:
        call()
    except kind as error:
        return [kind.__name__, error.status_code]
    return ["nothing was raised"]


def flood() -> None:
    model = chat(api_key=LIMITED_KEY)
    for _ in range(8):
        model.invoke(QUESTION)


def joined(chunks: Any) -> dict[str, Any]:
    num_chunks, whole = 0, None
    for chunk in chunks:
        num_chunks += 1
        whole = chunk if whole is None else whole + chunk
    assert whole is not None
    usage = whole.usage_metadata
    return {"text": whole.content, "usage": usage and usage["total_tokens"], "is streamed": num_chunks > 3}


def main() -> None:
    answer = chat().invoke([HumanMessage(QUESTION)])
    probable = chat().bind(logprobs=True, top_logprobs=2).invoke(QUESTION)
    stopped = chat().invoke(QUESTION, stop=["capital"])
    several = chat(n=3, temperature=1.5, seed=7).generate([[HumanMessage(QUESTION)]])
    asked = chat()
    completions = OpenAI(model=MODEL, base_url=URL, api_key=KEY, temperature=0, max_tokens=8)
    found = {
        "version": version("langchain-openai"),
        "text": answer.content,
        "reason": answer.response_metadata["finish_reason"],
        "usage": answer.usage_metadata["total_tokens"],
        "stream": joined(chat(stream_usage=False).stream(QUESTION)),
        "stream with usage": joined(chat(stream_usage=True).stream(QUESTION)),
        "with a system message": bool(chat().invoke([SystemMessage("Be brief."), HumanMessage(QUESTION)]).content),
        "logprobs": "".join(token["token"] for token in probable.response_metadata["logprobs"]["content"]),
        "n": len(several.generations[0]),
        "stop": [stopped.content, stopped.response_metadata["finish_reason"]],
        "completion": completions.invoke("The capital of"),
        "in a batch": [one.content for one in asked.batch([QUESTION] * 3)],
        "structured": asked.with_structured_output(Fact, method="json_schema").invoke(QUESTION).model_dump(),
        "together": [asyncio.run(asked.ainvoke(QUESTION)).content],
        "unknown model": refusal(lambda: chat(model="nobody/nothing").invoke(QUESTION), openai.NotFoundError),
        "wrong key": refusal(lambda: chat(api_key="wrong").invoke(QUESTION), openai.AuthenticationError),
        "limit": refusal(flood, openai.RateLimitError),
        "retries": len([chat(api_key=LIMITED_KEY, max_retries=5).invoke(QUESTION) for _ in range(3)]),
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
