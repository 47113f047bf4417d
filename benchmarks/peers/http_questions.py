"""Sends all questions concurrently over HTTP, and measures the time until the last answer has been read."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from typing import Any

import httpx

from benchmarks.peers.system import SystemFailed
from benchmarks.peers.workload import Question, Work

Document = dict[str, Any]

TIMEOUT_S = 3600.0
"""Longest wait for an answer, in seconds. A slow peer on a large model takes minutes."""


def post_all(
    url: str, bodies: Sequence[Document], headers: Mapping[str, str] | None = None
) -> tuple[list[Document], float]:
    """Send all bodies, and return the answers and the total seconds. Raises SystemFailed if a request fails."""
    return asyncio.run(_post_all(url, bodies, headers or {}))


async def _post_all(url: str, bodies: Sequence[Document], headers: Mapping[str, str]) -> tuple[list[Document], float]:
    limits = httpx.Limits(max_connections=len(bodies))
    async with httpx.AsyncClient(timeout=TIMEOUT_S, limits=limits, headers=headers, trust_env=False) as client:
        started = time.perf_counter()
        try:
            responses = await asyncio.gather(*(client.post(url, json=body) for body in bodies))
        except httpx.HTTPError as error:
            raise SystemFailed(f"the connection to {url} failed: {error!r}") from error
        seconds = time.perf_counter() - started
    for response in responses:
        if not response.is_success:
            raise SystemFailed(f"{url} answers {response.status_code}: {response.text[:500]}")
    return [response.json() for response in responses], seconds


def completion_body(question: Question, num_output: int, model: str) -> Document:
    """The body of a greedy `/v1/completions` request with token ids, for vLLM and loramux."""
    return {
        "model": model,
        "prompt": list(question.prompt),
        "max_tokens": num_output,
        "temperature": 0.0,
        "ignore_eos": True,
    }


def complete_all(
    name: str, url: str, work: Work, models: Mapping[str | None, str], extra: Document, api_key: str = ""
) -> tuple[list[Document], float]:
    """Send all questions to `/v1/completions`, and return the answers and the total seconds. `models` maps adapters to
    model names. Raises SystemFailed if an answer has the wrong length.
    """
    bodies = [
        completion_body(question, work.num_output, models[question.adapter]) | extra for question in work.questions
    ]
    headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
    documents, seconds = post_all(f"{url}/v1/completions", bodies, headers)
    require_lengths(name, [document["usage"]["completion_tokens"] for document in documents], work)
    return documents, seconds


def require_lengths(name: str, lengths: Sequence[int], work: Work) -> None:
    """Raise SystemFailed unless all answers have the requested length, from which throughput is computed."""
    if any(length != work.num_output for length in lengths):
        raise SystemFailed(f"{name} answered with {sorted(set(lengths))} tokens instead of {work.num_output}")
