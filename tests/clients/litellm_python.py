from __future__ import annotations

import asyncio
import json
import os
import time
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


def embedded() -> dict[str, Any]:
    answer = litellm.embedding(
        model=f"openai/{MODEL}", input=[CHAT["messages"][0]["content"], "Yes"], api_base=URL, api_key=KEY
    )
    return {"vectors": [one["embedding"] for one in answer.data], "usage": answer.usage.total_tokens}


def ranked() -> list[Any]:
    """Rank through litellm's provider for vLLM, which calls /rerank."""
    documents = ["Yes", CHAT["messages"][0]["content"]]
    answer: Any = litellm.rerank(
        model=f"hosted_vllm/{MODEL}", query=documents[1], documents=documents, top_n=1, api_base=URL, api_key=KEY
    )
    [first] = answer.results
    return [first["index"], first["document"]["text"], round(first["relevance_score"], 5)]


def responded() -> dict[str, Any]:
    asked: Any = {
        "model": f"openai/{MODEL}",
        "input": CHAT["messages"],
        "temperature": 0,
        "max_output_tokens": 48,
        "api_base": URL,
        "api_key": KEY,
    }
    whole: Any = litellm.responses(**asked)
    events: list[Any] = list(litellm.responses(**asked, stream=True))
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    return {"text": whole.output_text, "deltas": "".join(deltas), "is streamed": len(deltas) > 1}


def batched() -> dict[str, Any]:
    """Ask the same question in a batch."""
    at: Any = {"custom_llm_provider": "openai", "api_base": URL, "api_key": KEY}
    body = {name: CHAT[name] for name in ("messages", "temperature", "max_tokens")}
    line = {"custom_id": "good", "method": "POST", "url": "/v1/chat/completions", "body": {**body, "model": MODEL}}
    content = (json.dumps(line) + "\n").encode()
    file: Any = litellm.create_file(file=("in.jsonl", content), purpose="batch", **at)
    batch: Any = litellm.create_batch(
        input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h", **at
    )
    while batch.status not in ("completed", "failed", "expired"):
        time.sleep(0.2)
        batch = litellm.retrieve_batch(batch_id=batch.id, **at)
    output: Any = litellm.file_content(file_id=batch.output_file_id, **at)
    [answer] = [json.loads(one) for one in output.text.splitlines()]
    for file_id in (file.id, batch.output_file_id):
        litellm.file_delete(file_id=file_id, **at)
    return {"status": batch.status, "text": answer["response"]["body"]["choices"][0]["message"]["content"]}


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
        "embeddings": embedded(),
        "ranked": ranked(),
        "litellm's response": responded(),
        "litellm's batch": batched(),
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
