"""The demo's mixed batch: the same question, sent concurrently to the base and to every adapter."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import openai

from loramux.admin.demo.server import DemoFailed


@dataclass(frozen=True, slots=True)
class DemoQuestion:
    """`messages` and `tools` have the format of a chat completion request."""

    tenant: str
    api_key: str
    model: str
    messages: Sequence[Any]
    max_tokens: int
    tools: Sequence[Any] = ()

    @property
    def text(self) -> str:
        return str(next(message["content"] for message in reversed(self.messages) if message["role"] == "user"))


@dataclass(frozen=True, slots=True)
class DemoAnswer:
    """`adapter` is the adapter that the server reports, or None for the base.

    `message` is the assistant's message in the form that the next request's history needs.
    """

    question: DemoQuestion
    adapter: str | None
    text: str
    prompt_tokens: int
    completion_tokens: int
    time_to_first_token_s: float
    message: Mapping[str, Any]
    reasoning: str


def ask_together(
    base_url: str,
    questions: Sequence[DemoQuestion],
    at_once: int | None = None,
    on_answer: Callable[[], None] = lambda: None,
) -> list[DemoAnswer]:
    """Ask the questions concurrently, `at_once` or all, and return the answers in the order of the questions.

    Raises DemoFailed if the server refuses one.
    """
    try:
        return asyncio.run(_ask_all(base_url, questions, asyncio.Semaphore(at_once or len(questions)), on_answer))
    except ExceptionGroup as group:
        failed, others = group.split(openai.APIError)
        if failed is None or others is not None:
            raise
        raise DemoFailed(f"a question was not answered: {failed.exceptions[0]}") from group


async def _ask_all(
    base_url: str, questions: Sequence[DemoQuestion], turns: asyncio.Semaphore, on_answer: Callable[[], None]
) -> list[DemoAnswer]:
    # A proxy from the environment cannot reach this machine's loopback interface.
    async with openai.DefaultAsyncHttpxClient(trust_env=False) as http:
        async with asyncio.TaskGroup() as group:
            tasks = [
                group.create_task(
                    _ask_in_turn(
                        openai.AsyncOpenAI(
                            base_url=base_url, api_key=question.api_key, http_client=http, max_retries=0
                        ),
                        question,
                        turns,
                        on_answer,
                    )
                )
                for question in questions
            ]
        return [task.result() for task in tasks]


async def _ask_in_turn(
    client: openai.AsyncOpenAI, question: DemoQuestion, turns: asyncio.Semaphore, on_answer: Callable[[], None]
) -> DemoAnswer:
    async with turns:
        answer = await _ask(client, question)
    on_answer()
    return answer


async def _ask(client: openai.AsyncOpenAI, question: DemoQuestion) -> DemoAnswer:
    started = time.monotonic()
    raw = await client.chat.completions.with_raw_response.create(
        model=question.model,
        messages=question.messages,
        tools=question.tools or openai.omit,
        max_tokens=question.max_tokens,
        temperature=0.0,
        stream=True,
        stream_options={"include_usage": True},
    )
    first_token_s, parts, thoughts, usage = None, [], [], None
    calls: list[dict[str, Any]] = []
    async for chunk in raw.parse():
        for choice in chunk.choices:
            thought = getattr(choice.delta, "reasoning_content", None)
            if choice.delta.content or choice.delta.tool_calls or thought:
                first_token_s = first_token_s or time.monotonic() - started
            parts.append(choice.delta.content or "")
            thoughts.append(thought or "")
            for delta in choice.delta.tool_calls or ():
                assert delta.function is not None
                if delta.index == len(calls):
                    function = {"name": delta.function.name, "arguments": ""}
                    calls.append({"id": delta.id, "type": "function", "function": function})
                calls[delta.index]["function"]["arguments"] += delta.function.arguments or ""
        usage = chunk.usage or usage
    if usage is None:
        raise RuntimeError(f"{question.model} did not return a complete answer")
    text = "".join(parts)
    return DemoAnswer(
        question=question,
        adapter=raw.headers.get("x-loramux-adapter"),
        text=text,
        prompt_tokens=usage.prompt_tokens,
        completion_tokens=usage.completion_tokens,
        # An answer can be empty.
        time_to_first_token_s=time.monotonic() - started if first_token_s is None else first_token_s,
        message={"role": "assistant", "content": text, **({"tool_calls": calls} if calls else {})},
        reasoning="".join(thoughts),
    )
