from __future__ import annotations

import asyncio
import json
import os
import time
from typing import Any, Literal

import openai
from openai import AsyncOpenAI, OpenAI
from pydantic import BaseModel

URL, KEY, LIMITED_KEY, MODEL = (
    os.environ[name] for name in ("CLIENT_URL", "CLIENT_KEY", "CLIENT_LIMITED_KEY", "CLIENT_MODEL")
)
MESSAGES: Any = [{"role": "user", "content": "What is the capital of France?"}]
CHAT: Any = {"model": MODEL, "messages": MESSAGES, "temperature": 0, "max_tokens": 48}


class Fact(BaseModel):
    """The fields of a structured answer."""

    city: Literal["Paris", "Rome"]
    is_capital: bool


def refusal(call: Any, kind: type[openai.APIStatusError]) -> list[Any]:
    try:
        call()
    except kind as error:
        return [type(error).__name__, error.status_code, error.code, error.type, bool(error.request_id)]
    return ["nothing was raised"]


def joined(chunks: Any) -> dict[str, Any]:
    text, usage, reason, num_chunks, last_has_choices = "", None, None, 0, True
    for chunk in chunks:
        num_chunks += 1
        last_has_choices = bool(chunk.choices)
        usage = chunk.usage or usage
        for choice in chunk.choices:
            text += choice.delta.content or ""
            reason = choice.finish_reason or reason
    return {
        "text": text,
        "reason": reason,
        "usage": usage and usage.total_tokens,
        "is streamed": num_chunks > 3,
        "usage comes last": not last_has_choices,
    }


def limited(max_retries: int) -> OpenAI:
    return OpenAI(base_url=URL, api_key=LIMITED_KEY, max_retries=max_retries)


def retried() -> dict[str, Any]:
    """Send three requests with a retrying client under a limit of one request per five seconds."""
    patient = limited(5)
    begun = time.monotonic()
    answers = [patient.chat.completions.create(**CHAT) for _ in range(3)]
    return {"num answers": len(answers), "waited": time.monotonic() - begun > 1}


def limits() -> dict[str, Any]:
    # Earlier tests may have used up the limit.
    response = limited(5).chat.completions.with_raw_response.create(**CHAT)
    remaining = response.headers["x-ratelimit-remaining-requests"]
    for _ in range(8):
        try:
            limited(0).chat.completions.create(**CHAT)
        except openai.RateLimitError as error:
            return {
                "status": error.status_code,
                "code": error.code,
                "retry after": 0 < float(error.response.headers["retry-after"]) <= 60,
                "remaining was told": remaining.isdigit(),
            }
    return {"status": "never limited"}


async def together() -> list[str | None]:
    async with AsyncOpenAI(base_url=URL, api_key=KEY) as client:
        answers = await asyncio.gather(*(client.chat.completions.create(**CHAT) for _ in range(4)))
    return [answer.choices[0].message.content for answer in answers]


def responded(client: OpenAI) -> dict[str, Any]:
    """Ask the same question through the Responses API, whole, streamed and with a schema."""
    asked: Any = {"model": MODEL, "input": MESSAGES, "temperature": 0, "max_output_tokens": 48}
    whole = client.responses.create(**asked)
    with client.responses.stream(**asked) as stream:
        events = list(stream)
        last = stream.get_final_response()
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    fact = client.responses.parse(**asked, text_format=Fact).output_parsed
    return {
        "text": whole.output_text,
        "usage": whole.usage and whole.usage.total_tokens,
        "stored": whole.to_dict()["store"],
        "deltas": "".join(deltas),
        "is streamed": len(deltas) > 1,
        "kinds": [events[0].type, events[1].type, events[-1].type],
        "streamed usage": last.usage and last.usage.total_tokens,
        "structured": fact and fact.model_dump(),
        "previous": refusal(
            lambda: client.responses.create(**asked, previous_response_id="resp_1"), openai.NotFoundError
        ),
    }


def batched(client: OpenAI) -> dict[str, Any]:
    """Ask the same question, and for an unknown model, in a batch."""
    models = {"good": MODEL, "bad": "nobody/nothing"}
    lines = [
        {"custom_id": name, "method": "POST", "url": "/v1/chat/completions", "body": {**CHAT, "model": model}}
        for name, model in models.items()
    ]
    content = "".join(json.dumps(line) + "\n" for line in lines).encode()
    file = client.files.create(file=("in.jsonl", content), purpose="batch")
    batch = client.batches.create(
        input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h", metadata={"job": "test"}
    )
    while batch.status not in ("completed", "failed", "expired"):
        time.sleep(0.2)
        batch = client.batches.retrieve(batch.id)
    answers, errors = (
        [json.loads(line) for line in client.files.content(file_id or "").text.splitlines()]
        for file_id in (batch.output_file_id, batch.error_file_id)
    )
    found = {
        "status": batch.status,
        "counts": batch.request_counts and batch.request_counts.to_dict(),
        "metadata": batch.metadata,
        "text": [one["response"]["body"]["choices"][0]["message"]["content"] for one in answers],
        "usage": [one["response"]["body"]["usage"]["total_tokens"] for one in answers],
        "errors": [[one["custom_id"], one["response"]["status_code"]] for one in errors],
        "is listed": batch.id in [one.id for one in client.batches.list()],
        "file": client.files.retrieve(file.id).bytes == len(content),
        "cancelled": refusal(lambda: client.batches.cancel(batch.id), openai.ConflictError),
    }
    for file_id in (file.id, batch.output_file_id, batch.error_file_id):
        assert client.files.delete(file_id or "").deleted
    return {**found, "files left": len(client.files.list().data)}


def embedded(client: OpenAI) -> dict[str, Any]:
    """Embed the question. Unless told otherwise, the client asks for base64 and decodes it."""
    asked: Any = {"model": MODEL, "input": [MESSAGES[0]["content"], "Yes"]}
    default, numbers = client.embeddings.create(**asked), client.embeddings.create(**asked, encoding_format="float")
    return {
        "vectors": [one.embedding for one in default.data],
        "as numbers": [one.embedding for one in numbers.data],
        "dimensions": len(client.embeddings.create(**asked, dimensions=4).data[0].embedding),
        "usage": default.usage.total_tokens,
    }


def structured(answer: Any) -> Any:
    fact = answer.choices[0].message.parsed
    return fact and fact.model_dump()


def main() -> None:
    client = OpenAI(base_url=URL, api_key=KEY, max_retries=0)
    answer = client.chat.completions.create(**CHAT)
    probable = client.chat.completions.create(**CHAT, logprobs=True, top_logprobs=2)
    content = (probable.choices[0].logprobs and probable.choices[0].logprobs.content) or []
    several = client.chat.completions.create(**{**CHAT, "temperature": 1.5}, n=3, seed=7)
    stopped = client.chat.completions.create(**CHAT, stop=["capital"])
    whole = client.completions.create(model=MODEL, prompt="The capital of", max_tokens=8, temperature=0)
    parts = client.completions.create(model=MODEL, prompt="The capital of", max_tokens=8, temperature=0, stream=True)
    found = {
        "version": openai.__version__,
        "text": answer.choices[0].message.content,
        "reason": answer.choices[0].finish_reason,
        "usage": answer.usage and answer.usage.total_tokens,
        "stream": joined(client.chat.completions.create(**CHAT, stream=True)),
        "stream with usage": joined(
            client.chat.completions.create(**CHAT, stream=True, stream_options={"include_usage": True})
        ),
        "max_completion_tokens": client.chat.completions.create(
            model=MODEL, messages=MESSAGES, temperature=0, max_completion_tokens=48
        )
        .choices[0]
        .message.content,
        "logprobs": "".join(token.token for token in content),
        "logprobs are whole": all(token.logprob <= 0 and len(token.top_logprobs) == 2 for token in content),
        "n": sorted(choice.index for choice in several.choices),
        "stop": [stopped.choices[0].message.content, stopped.choices[0].finish_reason],
        "completion": whole.choices[0].text,
        "completion stream": "".join(part.choices[0].text for part in parts if part.choices),
        "models": sorted(model.id for model in client.models.list()),
        "model": client.models.retrieve(MODEL).id,
        "structured": structured(client.chat.completions.parse(**CHAT, response_format=Fact)),
        "response": responded(client),
        "batch": batched(client),
        "embeddings": embedded(client),
        "together": asyncio.run(together()),
        "unknown model": refusal(
            lambda: client.chat.completions.create(**{**CHAT, "model": "nobody/nothing"}), openai.NotFoundError
        ),
        "wrong key": refusal(
            lambda: OpenAI(base_url=URL, api_key="wrong", max_retries=0).chat.completions.create(**CHAT),
            openai.AuthenticationError,
        ),
        "wrong call": refusal(
            lambda: client.chat.completions.create(**{**CHAT, "temperature": 9}), openai.BadRequestError
        ),
        "limit": limits(),
        "retries": retried(),
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
