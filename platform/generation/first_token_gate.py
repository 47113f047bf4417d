"""Refuses requests whose first token would come too late for their service tier, before anything is reserved."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from loramux.engine.protocol.messages import StatsRequest
from loramux.engine.protocol.service_tiers import rank_of
from loramux.platform.engine_link.engine_client import EngineClient, EngineUnavailable
from loramux.platform.errors import ApiError, RateLimited, Unavailable
from loramux.platform.generation.first_token_forecast import FirstTokenForecast, Forecast
from loramux.platform.generation.mirrored_queue import Share
from loramux.platform.generation.plan import Plan
from loramux.platform.telemetry.package_metrics import GenerationMetrics

REPORT_INTERVAL_S = 0.25
"""Interval between reports of the engine, in seconds."""

REPORT_WAIT_S = 5.0
"""Timeout for a report of the engine, in seconds."""

USED_PART = 0.7
"""Part of an objective that a forecast may use. The rest is for requests of other tenants that arrive later and get
their turn earlier, and for errors of the forecast.
"""

MAX_RETRY_S = 60.0
"""Longest `Retry-After`, in seconds."""


@dataclass(slots=True)
class _Awaited:
    """A request without a first token: its tier, when it entered, how long it was to wait in the queue, whether its
    adapter had to be loaded, and when it was sent to the engine. Times are in seconds.
    """

    tier: str
    entered_s: float
    queued_s: float
    is_cold: bool
    sent_s: float | None = None


class FirstTokenGate:
    """`objectives` are the longest times until the first token, in seconds, by service tier. Requests of other tiers
    are never refused. Without objectives, the gate does nothing. `clock` returns seconds.

    The gate must know each request from `enter` to `leave`. `follow` must run alongside.
    """

    def __init__(
        self,
        engine: EngineClient,
        objectives: Mapping[str, float],
        metrics: GenerationMetrics,
        clock: Callable[[], float],
    ) -> None:
        self._engine = engine
        self._objectives = objectives
        self._metrics = metrics
        self._clock = clock
        self._forecast = FirstTokenForecast(clock)
        self._awaited: dict[str, _Awaited] = {}
        """The requests without a first token whose tiers have an objective."""
        self._resident: frozenset[str] = frozenset()
        """The adapters that the last report shows to be loaded."""

    def check(self, share: Share, prompt_tokens: int = 0, is_cold: bool = False) -> float:
        """Raise RateLimited if the tenant's own requests would delay a request's first token beyond the objective of
        its tier, and Unavailable if those of all tenants together would. Without `prompt_tokens`, the prompt counts as
        empty, so that a request can be refused before it is tokenised. `is_cold` is True if its adapter must be loaded.
        Returns the wait in the queue that is forecast, in seconds, which is 0 for a tier without an objective.

        A request that would be the next to run is not refused. After one slow step, it shows that the engine is fast.
        """
        objective_s = self._objectives.get(share.service_tier)
        if objective_s is None:
            return 0.0
        forecast = self._forecast.forecast(share, prompt_tokens, is_cold)
        if forecast.seconds > USED_PART * objective_s and not forecast.is_next:
            refusal = _refusal(forecast, share.service_tier, objective_s)
            self._metrics.overload_refusals.labels(share.service_tier, str(refusal.status)).inc()
            raise refusal
        return forecast.queued_s

    def enter(self, plan: Plan) -> None:
        """Let a request in. Raises what `check` raises."""
        if not self._objectives or plan.is_background:
            return
        tier, share = plan.service_tier, plan.target.share_in(plan.service_tier)
        if plan.pooling is None:
            # The objective is about the first token of any choice.
            adapter = plan.adapter_to_load
            is_cold = adapter is not None and adapter.digest not in self._resident
            queued_s = self.check(share, min(map(len, plan.prompts)), is_cold)
            if tier in self._objectives:
                self._awaited[plan.request_id] = _Awaited(tier, self._clock(), queued_s, is_cold)
        is_pooled = plan.pooling is not None
        self._forecast.queue.add(plan.request_id, share, plan.prompt_tokens, plan.num_sequences, is_pooled)

    def send(self, request_id: str) -> None:
        """Note that a request is sent to the engine, after its reservation."""
        awaited = self._awaited.get(request_id)
        if awaited is not None:
            awaited.sent_s = self._clock()

    def begin(self, request_id: str) -> None:
        """Note that a request has got its first token."""
        self._forecast.queue.begin(request_id)
        awaited = self._awaited.pop(request_id, None)
        if awaited is not None:
            now_s = self._clock()
            if awaited.sent_s is not None:
                rank = rank_of(awaited.tier, is_background=False)
                self._forecast.correct(rank, awaited.queued_s, now_s - awaited.sent_s, awaited.is_cold)
            is_late = now_s - awaited.entered_s > self._objectives[awaited.tier]
            self._metrics.first_tokens.labels(awaited.tier, "late" if is_late else "in_time").inc()

    def leave(self, request_id: str, num_tokens: int = 0, cached_tokens: int = 0) -> None:
        """Note that a request has ended after `num_tokens` output tokens, with `cached_tokens` tokens of its prompts
        from the prefix cache, or that nothing was reserved for it.
        """
        self._forecast.queue.remove(request_id, num_tokens, cached_tokens)
        awaited = self._awaited.pop(request_id, None)
        if awaited is not None and self._clock() - awaited.entered_s > self._objectives[awaited.tier]:
            self._metrics.first_tokens.labels(awaited.tier, "late").inc()

    async def look(self) -> None:
        """Ask the engine for a report. If the engine does not answer, keep the last report."""
        try:
            stats = await self._engine.call(StatsRequest(), REPORT_WAIT_S)
        except (EngineUnavailable, TimeoutError):
            return
        self._resident = frozenset(adapter.digest for adapter in stats.adapters)
        self._forecast.note(stats)

    async def follow(self) -> None:
        """Loop forever, asking for reports. Returns at once without objectives."""
        while self._objectives:
            await self.look()
            await asyncio.sleep(REPORT_INTERVAL_S)


def _refusal(forecast: Forecast, tier: str, objective_s: float) -> ApiError:
    limit_s = USED_PART * objective_s
    retry_after_s = min(MAX_RETRY_S, forecast.seconds - limit_s)
    late = f"the first token is expected in {forecast.seconds:.3g} s"
    limit = f"too late for the {objective_s:g} s of the service tier {tier}; try again later"
    if forecast.own_s > limit_s:
        return RateLimited(
            f"{late} because of your tenant's own requests, {limit}",
            param="service_tier",
            code="overloaded",
            retry_after_s=retry_after_s,
        )
    return Unavailable(f"{late}, {limit}", code="overloaded", retry_after_s=retry_after_s)
