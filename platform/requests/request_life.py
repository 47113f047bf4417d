"""The steps of a request that all endpoints share, in order, from reading the body to settlement."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from dataclasses import replace
from functools import partial
from typing import Any, cast

import structlog
from fastapi import Request
from starlette.responses import Response
from starlette.types import Receive

from loramux.engine.protocol.service_tiers import SERVICE_TIERS
from loramux.engine.sequences.activation import activations, last_tokens
from loramux.migrations.identifiers import new_id
from loramux.platform.accounts.model_names import AdapterNotValidated, ModelNotFound
from loramux.platform.accounts.principals import Principal
from loramux.platform.bodies.generation_request import GenerationRequest
from loramux.platform.bodies.request_body import parse_body_on, read_body
from loramux.platform.errors import ApiError, InvalidRequest
from loramux.platform.generation.choice import ChoiceDelta
from loramux.platform.generation.generation import Generation
from loramux.platform.generation.mirrored_queue import Share
from loramux.platform.generation.plan import Plan, Target
from loramux.platform.grammars.constraint import Constraint
from loramux.platform.ledger.settlement import Settlement
from loramux.platform.quotas.decisions import QuotaExceeded, RequestTooLarge, exceeded_headers, rate_limit_headers
from loramux.platform.requests import sse
from loramux.platform.requests.answers import Answer, RawAnswer
from loramux.platform.requests.endpoint import (
    AnyEndpoint,
    B,
    Body,
    Endpoint,
    PooledEndpoint,
    Prepared,
    Prompts,
    Received,
)
from loramux.platform.requests.error_responses import engine_unavailable, json_response, request_id_of
from loramux.platform.requests.planning import check_generates, check_untokenised, make_plan, truncated
from loramux.platform.requests.services import GatewayServices
from loramux.platform.telemetry.tracing import describe, traced

CLIENT_CLOSED = 499
"""The status that metrics record when a request's client disconnects. It is never sent."""

REFUSED_STALE_US = 60_000_000
"""Maximum age of the tenant's settings by which a request is refused for overload, in microseconds. Requests that are
not refused use settings that are at most five seconds old.
"""

OVERLOADED = "overloaded"
"""The code of refusals by the first-token gate and by an engine whose queue is full."""

log = structlog.get_logger()


async def serve(request: Request, services: GatewayServices, caller: Principal, endpoint: AnyEndpoint) -> Response:
    """Handle a request by an authenticated caller.

    If the request fails before the response starts, raises ApiError or an exception that ErrorResponses translates.
    """
    received = await read(request, services, endpoint)
    return await serve_received(request, services, caller, endpoint, received)


async def serve_received(
    request: Request,
    services: GatewayServices,
    caller: Principal,
    endpoint: AnyEndpoint,
    received: Received[Body],
    target: Target | None = None,
) -> Response:
    """Handle a request whose body has been read and checked, and whose model has been resolved if `target` is given.
    See `serve`.

    A request to an alias that would be refused for overload, or whose adapter cannot be loaded, is answered by the
    alias's overflow, if it has one.
    """
    settings = services.settings
    body = received.body.shown_as(with_usage=settings.forces_usage, by_token_id=settings.names_tokens_by_id)
    received = replace(received, body=body)
    try:
        return await _serve_as(request, services, caller, endpoint, received, target)
    except ApiError as error:
        overflow = await _overflow(services, caller, received, error)
        if overflow is None:
            raise
        refusal, refused_model = error, getattr(request.state, "model", None)
    # The ledger may have an event of the request that was refused.
    request.state.request_id = new_id("req")
    log.info("overflow", model=body.model, answered_by=overflow.model.name, answered_as=request_id_of(request))
    services.metrics.generation.overflows.inc()
    assert isinstance(body, GenerationRequest)
    # Where the request's own tier has no room, only the last tier may wait longer.
    tier = overflow.tiers.tier(SERVICE_TIERS[-1] if refusal.code == OVERLOADED else body.service_tier)
    other = body.answered_by(overflow.model.name, tier)
    received = replace(received, request_id=request_id_of(request), body=other)
    try:
        response = await _serve_as(request, services, caller, endpoint, received, overflow)
    except InvalidRequest:
        # The model that was asked for could answer the request later, and the overflow never can.
        request.state.model = refused_model
        raise refusal from None
    response.headers["x-loramux-overflow-of"] = body.model
    return response


async def _serve_as(
    request: Request,
    services: GatewayServices,
    caller: Principal,
    endpoint: AnyEndpoint,
    received: Received[Body],
    target: Target | None,
) -> Response:
    body = received.body
    if target is None:
        _refuse_early(services, caller, body)
        target = await resolve(services, caller, body.model, body.user)
    request.state.model = target.model.name
    if isinstance(body, GenerationRequest):
        services.run.gate.check(target.share_in(target.tiers.tier(body.service_tier)))
    plan, shape = await planned(services, caller, endpoint, received, target)
    started_s = time.monotonic()
    headers = await reserve(services, plan, received.body)
    generation = services.run.requests.start(plan, partial(run_and_settle, services))
    generation.abandon_when(disconnected(request.receive))
    try:
        return await answer(services, generation, received.body, endpoint, shape, headers, started_s)
    except ApiError as error:
        error.headers = {**headers, **error.headers}
        error.has_begun = generation.has_begun
        raise


def _refuse_early(services: GatewayServices, caller: Principal, body: Body) -> None:
    """Refuse a request whose first token would be late, before its model is looked up in the database, if its tenant is
    known. Raises what `FirstTokenGate.check` raises.
    """
    if caller.tenant_id is None or not isinstance(body, GenerationRequest):
        return
    share = services.callers.tenants.recent_share(caller.tenant_id, REFUSED_STALE_US)
    if share is not None:
        tiers = share.tiers.for_key(caller.max_service_tier, caller.default_service_tier)
        services.run.gate.check(Share(caller.tenant_id, tiers.tier(body.service_tier), share.weight))


async def _overflow(
    services: GatewayServices, caller: Principal, received: Received[Body], refusal: ApiError
) -> Target | None:
    """Return what answers a refused request in place of the alias that it names, or None if nothing does.

    The caller must be allowed to call both. Requests of the tier `priority` do not overflow. Raises what `resolve`
    raises, except that nobody learns whether a model exists that they may not call.
    """
    body, overflows = received.body, services.callers.overflows
    # A request that has begun is charged for its tokens. Its overflow would charge it a second time.
    if refusal.has_begun or refusal.code not in (OVERLOADED, "adapter_unavailable"):
        return None
    if not isinstance(body, GenerationRequest):
        return None
    is_recent = overflows.is_recent
    model = overflows.of(caller, body.model) if is_recent else await services.call(overflows.of, caller, body.model)
    if model is None:
        return None
    try:
        # Only whether the caller may call the alias matters: what it stands for may be unusable on this server.
        await services.call(services.callers.resolver.resolve, caller, body.model, body.user)
        target = await resolve(services, caller, model, body.user)
    except (ModelNotFound, AdapterNotValidated):
        return None
    return None if target.tiers.tier(body.service_tier) == SERVICE_TIERS[0] else target


async def planned(
    services: GatewayServices,
    caller: Principal,
    endpoint: AnyEndpoint,
    received: Received[Any],
    target: Target | None = None,
) -> tuple[Plan, Answer]:
    """Return a request's plan, and the object that builds its response. The model is resolved unless `target` is given.
    Raises what the steps below raise.
    """
    target = target or await resolve(services, caller, received.body.model, received.body.user)
    if isinstance(endpoint, PooledEndpoint):
        plan, answer = await endpoint.plan(services, target, received)
        # Nothing else of the answer is used, because these bodies have no stream.
        return plan, cast(Answer, answer)
    check_generates(target)
    prepared = await prepare(services, endpoint, target, received)
    grammar = await constrain(services, target, endpoint.constraint(target, received.body, prepared))
    plan = make_plan(services, endpoint, received, target, prepared, grammar)
    return plan, await endpoint.shape(services, target, received, prepared)


async def run_and_settle(services: GatewayServices, generation: Generation) -> None:
    """Run an admitted request and settle it. This task outlives the connection, so that every request is settled."""
    settlement = await generation.run()
    try:
        await settle(services, generation.plan, settlement)
    finally:
        # Even if settling fails, readers of the deltas must not wait forever.
        generation.end(settlement)


async def read(request: Request, services: GatewayServices, endpoint: AnyEndpoint) -> Received[Any]:
    """Read and validate the body. Raises InvalidRequest or PayloadTooLarge."""
    sent = await read_body(request, services.settings.max_body_bytes)
    body = await parse_body_on(services.compute, sent, endpoint.parse)
    body.check()
    return Received(request_id_of(request), body, len(sent))


async def resolve(services: GatewayServices, caller: Principal, name: str, user: str | None = None) -> Target:
    """Resolve the model to a version.

    If an alias stands for several versions, requests with the same `user` get the same version while the alias's
    weights are unchanged. Raises ModelNotFound, AdapterNotValidated, InvalidRequest, PermissionDenied, Unavailable or
    DatabaseTrouble.
    """
    recent = None if caller.tenant_id is None else services.callers.tenants.recent_share(caller.tenant_id)

    def find() -> Target:
        model = services.callers.resolver.resolve(caller, name, user)
        assert caller.tenant_id is not None
        share = recent or services.callers.tenants.share(caller.tenant_id)
        settings = services.callers.version_settings.find(model)
        tokenizer = services.prompts.version_tokenizers.find(settings.vocabulary)
        tiers = share.tiers.for_key(caller.max_service_tier, caller.default_service_tier)
        vocab_size = services.model.vocab_size
        return Target(caller.tenant_id, caller.key_id, model, share, settings, tokenizer, vocab_size, tiers)

    with traced("resolve"):
        # If the share is cached, resolving the base needs no database and therefore no thread.
        if recent is not None and name == services.callers.resolver.served_name:
            return find()
        return await services.call(find)


async def prepare(services: GatewayServices, endpoint: Endpoint[B], target: Target, received: Received[B]) -> Prepared:
    """Tokenise the prompts, and truncate them if the body asks for it.

    Raises InvalidRequest, RateLimited or Unavailable.
    """
    check_untokenised(services, target, received.body)
    with traced("tokenise"):
        prepared = await endpoint.prepare(services, target, received)
        words = received.body.bad_words or []
        num_characters = 2 * sum(len(word) + 1 for word in words)
        bad_words = await services.compute_if_long(num_characters, target.tokenizer.spellings, words)
    prompts = truncated(services.max_model_len, received.body, prepared.prompts)
    num_own = None if received.body.num_prompt_logprobs is not None else own_tokens(target)
    if num_own is None:
        found = await activated(services, target, prompts)
    else:
        found = last_tokens(prompts, num_own)
    return replace(prepared, prompts=prompts, activations=found, bad_words=bad_words)


async def activated(services: GatewayServices, target: Target, prompts: Prompts) -> tuple[int | None, ...]:
    """Return the position in each prompt from which the adapter applies: see `Plan.activations`."""
    adapter = target.model.adapter
    invocation_tokens = () if adapter is None else adapter.invocation_tokens
    num_searched = sum(len(prompt) for prompt in prompts) if invocation_tokens else 0
    return await services.compute_if_long(num_searched, activations, prompts, invocation_tokens)


def own_tokens(target: Target) -> int | None:
    """Return the number of a prompt's last tokens that the adapter computes if its alias shares the base's cache.

    None if the adapter computes the whole prompt. An alias can have the option and move to a version that cannot share.
    """
    adapter = target.model.adapter
    if adapter is None or adapter.invocation_tokens or adapter.task or target.settings.vocabulary is not None:
        return None
    return adapter.share_base_cache


async def constrain(services: GatewayServices, target: Target, constraint: Constraint | None) -> str:
    """Return the checked grammar that the answer must follow, or "" if there is no constraint.

    Raises InvalidRequest, RateLimited or Unavailable.
    """
    if constraint is None:
        return ""
    with traced("constrain"):
        return await services.prompts.grammars.grammar(target.tenant_id, constraint)


async def reserve(services: GatewayServices, plan: Plan, body: Body) -> dict[str, str]:
    """Reserve quota and return the response headers that report the limits.

    Raises Unavailable if the engine is not ready, or an exception that `RunningRequests.reserve` raises.
    """
    model, tenant_id = plan.target.model, plan.target.tenant_id
    describe(model=model.name, tenant_id=tenant_id, prompt_tokens=plan.prompt_tokens, stream=bool(body.stream))
    if not services.engine.is_ready:
        raise engine_unavailable()
    try:
        with traced("reserve"):
            reservation = await services.run.requests.reserve(plan)
    except (QuotaExceeded, RequestTooLarge) as refusal:
        services.metrics.quotas.count_refusal(refusal.policy)
        raise
    for policy in reservation.exceeded:
        services.metrics.quotas.count_refusal(policy, policy.mode)
    headers = {
        **rate_limit_headers(reservation.limits),
        **exceeded_headers(reservation.exceeded),
    }
    # A base that is named after its directory can have a name that no header can contain.
    if model.name.isascii() and model.name.isprintable():
        # The name in /metrics/routing, so that a picker learns which model a client's name means.
        headers["x-loramux-resolved-model"] = model.name
    if model.adapter is None:
        return headers
    num_own = own_tokens(plan.target)
    if num_own is not None and any(plan.activations):
        headers["x-loramux-share-base-cache"] = str(num_own)
    return {**headers, "x-loramux-adapter": model.name, "x-loramux-fingerprint": model.adapter.fingerprint}


async def answer(
    services: GatewayServices,
    generation: Generation,
    body: Body,
    endpoint: AnyEndpoint,
    shape: Answer,
    headers: dict[str, str],
    started_s: float,
) -> Response:
    """Wait for the first token, then return the response, whole or streamed.

    A failure before the first token therefore gets an error status, even if the response is to be streamed.
    """
    plan, deltas = generation.plan, generation.deltas()
    first = await anext(deltas, None)
    if first is not None:
        seconds = services.metrics.api.first_token_seconds
        seconds.labels(plan.endpoint, plan.service_tier).observe(time.monotonic() - started_s)
    if body.stream and first is not None and isinstance(endpoint, Endpoint):
        return sse.EventStream(_events(first, deltas, generation, endpoint, shape), headers)
    collected = [] if first is None else [first, *[delta async for delta in deltas]]
    if generation.is_abandoned:
        return Response(status_code=CLIENT_CLOSED)
    if isinstance(endpoint, Endpoint) and endpoint.keep is not None:
        await endpoint.keep(shape, collected, generation.usage)
    if isinstance(endpoint, PooledEndpoint) and isinstance(shape, RawAnswer):
        raw = await services.compute(shape.raw, collected, generation.usage)
        return Response(raw.content, headers={**headers, **raw.headers}, media_type="application/octet-stream")
    if not body.has_long_answer:
        return json_response(shape.whole(collected, generation.usage), headers=headers)
    document = await services.compute(shape.whole, collected, generation.usage)
    return await services.compute(json_response, document, headers=headers)


async def settle(services: GatewayServices, plan: Plan, settlement: Settlement) -> None:
    """Charge the actual usage and release the rest of the reservation."""
    with traced("settle"):
        await services.run.settler.settle(plan.request_id, settlement)


async def _events(
    first: ChoiceDelta,
    deltas: AsyncIterator[ChoiceDelta],
    generation: Generation,
    endpoint: Endpoint[Any],
    shape: Answer,
) -> AsyncIterator[bytes]:
    yield shape.events(first)
    try:
        async for delta in deltas:
            yield shape.events(delta)
    except ApiError as error:
        yield shape.failure(error)
        return
    if generation.is_abandoned:
        return
    if endpoint.keep is not None:
        await endpoint.keep(shape, (), generation.usage)
    yield shape.end(generation.usage)


async def disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
