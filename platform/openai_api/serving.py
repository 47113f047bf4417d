"""From a plan to the response: reserve, run, stream or collect. The generation settles itself."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator

from fastapi import Request
from starlette.responses import Response
from starlette.types import Receive

from loramux.platform.errors import ApiError
from loramux.platform.generation.choice import ChoiceDelta
from loramux.platform.generation.generation import Generation
from loramux.platform.generation.plan import Plan
from loramux.platform.openai_api import sse
from loramux.platform.openai_api.answers import Answer
from loramux.platform.openai_api.error_responses import engine_unavailable, json_response
from loramux.platform.openai_api.services import GatewayServices
from loramux.platform.quotas.decisions import QuotaExceeded, RequestTooLarge, exceeded_headers, rate_limit_headers
from loramux.platform.telemetry.tracing import describe, traced

CLIENT_CLOSED = 499
"""What the metrics say of a request whose client left; nobody receives it."""


async def serve(
    request: Request, services: GatewayServices, plan: Plan, answer: Answer, *, stream: bool, include_usage: bool
) -> Response:
    """Run a plan and answer with it; raises ApiError when it fails before its first token."""
    started = time.monotonic()
    describe(model=plan.model.name, tenant_id=plan.tenant_id, prompt_tokens=plan.prompt_tokens, stream=stream)
    if not services.engine.is_ready:
        raise engine_unavailable()
    try:
        with traced("reserve"):
            reservation = await services.running.reserve(plan)
    except (QuotaExceeded, RequestTooLarge) as refusal:
        services.metrics.count_refusal(refusal.policy)
        raise
    for policy in reservation.exceeded:
        services.metrics.count_refusal(policy, policy.mode)
    headers = {**rate_limit_headers(reservation.limits), **exceeded_headers(reservation.exceeded)}
    if plan.model.adapter is not None:
        headers["x-loramux-adapter"] = plan.model.name
    generation = services.running.start(plan)
    generation.abandon_when(_disconnected(request.receive))
    deltas = generation.deltas()
    # The status is not sent before the first token, so that what fails until then is an ordinary error.
    try:
        first = await anext(deltas, None)
        if first is not None:
            services.metrics.first_token_seconds.labels(plan.endpoint).observe(time.monotonic() - started)
        if stream and first is not None:
            return sse.EventStream(_events(first, deltas, generation, answer, include_usage), headers)
        collected = [] if first is None else [first, *[delta async for delta in deltas]]
    except ApiError as error:
        error.headers = {**headers, **error.headers}
        raise
    if generation.is_abandoned:
        return Response(status_code=CLIENT_CLOSED)
    return json_response(answer.whole(collected, generation.usage), headers=headers)


async def _events(
    first: ChoiceDelta,
    deltas: AsyncIterator[ChoiceDelta],
    generation: Generation,
    answer: Answer,
    include_usage: bool,
) -> AsyncIterator[bytes]:
    """Last chunk, settlement, usage, `[DONE]`; a failure ends the stream with its envelope and no `[DONE]`."""
    yield _chunks(answer, first)
    try:
        async for delta in deltas:
            yield _chunks(answer, delta)
    except ApiError as error:
        yield sse.event(error.envelope())
        return
    if generation.is_abandoned:
        return
    if include_usage:
        yield sse.event(answer.usage_chunk(generation.usage))
    yield sse.DONE


def _chunks(answer: Answer, delta: ChoiceDelta) -> bytes:
    return b"".join(sse.event(chunk) for chunk in answer.chunks(delta))


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
