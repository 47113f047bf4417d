"""The demo's mixed batch: the same question, sent concurrently to the base and to every adapter."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass

import openai


@dataclass(frozen=True, slots=True)
class Question:
    """One request: tenant, key, model and question."""

    tenant: str
    api_key: str
    model: str
    text: str
    max_tokens: int


@dataclass(frozen=True, slots=True)
class Answer:
    """One answer. `adapter` is the adapter that the server reports; None means the base."""

    question: Question
    adapter: str | None
    text: str
    prompt_tokens: int
    completion_tokens: int
    time_to_first_token_s: float


def ask_together(base_url: str, questions: Sequence[Question]) -> list[Answer]:
    """Ask all questions concurrently and return the answers in the order of the questions."""
    return asyncio.run(_ask_all(base_url, questions))


async def _ask_all(base_url: str, questions: Sequence[Question]) -> list[Answer]:
    # A proxy from the environment cannot reach this machine's loopback interface.
    async with openai.DefaultAsyncHttpxClient(trust_env=False) as http:
        async with asyncio.TaskGroup() as group:
            tasks = [
                group.create_task(
                    _ask(
                        openai.AsyncOpenAI(
                            base_url=base_url, api_key=question.api_key, http_client=http, max_retries=0
                        ),
                        question,
                    )
                )
                for question in questions
            ]
        return [task.result() for task in tasks]


async def _ask(client: openai.AsyncOpenAI, question: Question) -> Answer:
    started = time.monotonic()
    raw = await client.chat.completions.with_raw_response.create(
        model=question.model,
        messages=[{"role": "user", "content": question.text}],
        max_tokens=question.max_tokens,
        temperature=0.0,
        stream=True,
        stream_options={"include_usage": True},
    )
    first_token_s, parts, usage = None, [], None
    async for chunk in raw.parse():
        for choice in chunk.choices:
            if choice.delta.content:
                first_token_s = first_token_s or time.monotonic() - started
                parts.append(choice.delta.content)
        usage = chunk.usage or usage
    if usage is None or first_token_s is None:
        raise RuntimeError(f"{question.model} did not return a complete answer")
    return Answer(
        question=question,
        adapter=raw.headers.get("x-loramux-adapter"),
        text="".join(parts),
        prompt_tokens=usage.prompt_tokens,
        completion_tokens=usage.completion_tokens,
        time_to_first_token_s=first_token_s,
    )
