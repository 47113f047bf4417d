"""Makes admission decisions without a database, including the amounts to reserve and the response headers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from loramux.platform.errors import InvalidRequest, RateLimited
from loramux.platform.quotas.counters import Counter, CounterKey
from loramux.platform.quotas.demand import PricedDemand
from loramux.platform.quotas.metrics import METRICS, REQUESTS_PER_MINUTE, STORED_BYTES, TOKENS_PER_MINUTE, Kind, Unit
from loramux.platform.quotas.policies import SHADOW, SOFT, QuotaPolicy
from loramux.platform.quotas.rules import Binding

_HEADER_KINDS = {REQUESTS_PER_MINUTE: "requests", TOKENS_PER_MINUTE: "tokens"}
POLICY_HEADER = "x-loramux-quota-policy"
"""Header that names the refusing policy, unless another tenant owns the policy."""
EXCEEDED_HEADER = "x-loramux-quota-exceeded"
"""Header that names the metrics whose soft limits a request exceeded."""


@dataclass(frozen=True, slots=True)
class RateLimit:
    """A rate and its remaining amount. `kind` is `requests` or `tokens`, as in the response headers. The limit and the
    reset are None if another tenant has set the limit.
    """

    kind: str
    limit: int | None
    remaining: int
    reset_us: int | None
    """Time until the bucket is full again if nothing more is used, in microseconds."""


class QuotaExceeded(RateLimited):
    """The request is refused for now, because a budget is spent or a limit is reached."""

    def __init__(
        self, verdict: PolicyVerdict, limits: tuple[RateLimit, ...] = (), fitting_max_tokens: int | None = None
    ) -> None:
        """`fitting_max_tokens` is the largest max_tokens with which the request would be admitted now, if any."""
        binding, wait_us = verdict.binding, verdict.wait_us
        policy = binding.policy
        is_rate = METRICS[policy.metric].kind in (Kind.RATE, Kind.CONCURRENCY)
        advice = "" if fitting_max_tokens is None else f"; max_tokens of at most {fitting_max_tokens} would fit now"
        super().__init__(
            _standing(verdict) + advice,
            param=policy.metric,
            # If the limit is zero, waiting does not help.
            code=None if is_rate and policy.limit else "insufficient_quota",
            retry_after_s=wait_us / 1_000_000,
            headers={**rate_limit_headers(limits), **_policy_header(binding)},
        )
        self.policy = policy
        self.wait_us = wait_us


class RequestTooLarge(InvalidRequest):
    """The request costs more than a policy ever admits at once, so waiting does not help."""

    code = "request_too_large"

    def __init__(self, verdict: PolicyVerdict, fitting_max_tokens: int | None = None) -> None:
        """`fitting_max_tokens` is the largest max_tokens that the policies ever admit, if there is one."""
        binding, cost = verdict.binding, verdict.cost
        policy, metric = binding.policy, binding.metric
        most = policy.burst if metric.kind is Kind.RATE else policy.limit
        admitted = "less" if binding.is_anothers else f"at most {metric.text(most)}"
        amount = f"cost {metric.text(cost)}" if metric.unit is Unit.NANOS else f"use {metric.text(cost)} {metric.unit}"
        super().__init__(
            f"the request may {amount}, but the {policy.scope}'s {policy.metric} admits {admitted} at once: "
            + (
                "shorten the prompt, or set or lower max_tokens"
                if fitting_max_tokens is None
                else f"set max_tokens to at most {fitting_max_tokens}, or shorten the prompt"
            ),
            param="max_tokens",
            headers=_policy_header(binding),
        )
        self.policy = policy


@dataclass(frozen=True, slots=True)
class Charge:
    policy_id: str
    window_start_us: int
    amount: int


@dataclass(frozen=True, slots=True)
class Decision:
    counters: dict[CounterKey, Counter]
    charges: tuple[Charge, ...]
    limits: tuple[RateLimit, ...]
    exceeded: tuple[QuotaPolicy, ...]


@dataclass(frozen=True, slots=True)
class PolicyVerdict:
    binding: Binding
    counter: Counter
    """The counter before the request."""
    cost: int
    never_admits: bool
    wait_us: int
    """Time to wait, in microseconds. 0 if the policy admits the request."""


def verdicts(
    bindings: Sequence[Binding], counters: Mapping[CounterKey, Counter], demand: PricedDemand, now_us: int
) -> list[PolicyVerdict]:
    """Return the verdict of each policy, regardless of the policy's mode."""
    found = []
    for binding in bindings:
        cost = demand.amounts[binding.metric.unit]
        counter = binding.current(counters.get(binding.key), now_us)
        wait_us = binding.wait_us(counter, cost, now_us)
        found.append(PolicyVerdict(binding, counter, cost, wait_us > 0 and binding.never_admits(cost), wait_us))
    return found


def refusal(
    judged: Sequence[PolicyVerdict], demand: PricedDemand, now_us: int
) -> QuotaExceeded | RequestTooLarge | None:
    """Return the error if a hard policy refuses the request, otherwise None. A policy that can never admit the cost
    takes precedence, then the policy with the longest wait.
    """
    against = [verdict for verdict in judged if verdict.wait_us and verdict.binding.is_hard]
    for verdict in against:
        if verdict.never_admits:
            return RequestTooLarge(verdict, _fitting_max_tokens(judged, demand, is_unused=True))
    if not against:
        return None
    longest = max(against, key=lambda verdict: verdict.wait_us)
    limits = _limits([(verdict.binding, verdict.counter) for verdict in judged], now_us)
    return QuotaExceeded(longest, limits, _fitting_max_tokens(judged, demand, is_unused=False))


def _standing(verdict: PolicyVerdict) -> str:
    """Say how much of a limit is taken and how much the request would take. Another tenant's limit stays private."""
    binding, counter = verdict.binding, verdict.counter
    policy, metric = binding.policy, binding.metric
    if binding.is_anothers:
        return f"the {policy.scope}'s limit for {policy.metric} is reached"
    limit = f"the {policy.scope}'s limit of {metric.text(policy.limit)} for {policy.metric}"
    if metric.unit not in (Unit.TOKENS, Unit.NANOS, Unit.BYTES):
        return f"{limit} is reached"
    remaining = binding.remaining(counter)
    state = f"leaves {metric.text(remaining)}" if remaining else "is reached"
    # A bucket that refills does not record how much was used.
    used = "" if metric.kind is Kind.RATE else f"{metric.text(counter.used)} are used, "
    if policy.metric == STORED_BYTES:
        return f"{limit} {state}: {used}so delete stored responses, chat completions or conversations first"
    holders, asking = ("open uploads", "upload") if metric.kind is Kind.STOCK else ("running requests", "request")
    return (
        f"{limit} {state}: {used}{holders} reserve {metric.text(counter.reserved)}, "
        f"and this {asking} would reserve {metric.text(verdict.cost)}"
    )


def _fitting_max_tokens(judged: Sequence[PolicyVerdict], demand: PricedDemand, *, is_unused: bool) -> int | None:
    """Return the largest max_tokens with which all hard policies would admit the request, now or, with `is_unused`,
    with unused counters.

    Returns None if there is none, or if another tenant's policy determines it.
    """
    own: list[int] = []
    theirs: list[int] = []
    for verdict in judged:
        binding = verdict.binding
        if not binding.is_hard:
            continue
        amount = binding.capacity if is_unused else binding.remaining(verdict.counter)
        fitting = demand.fitting_max_tokens(binding.metric.unit, amount) if binding.is_extended else None
        if fitting is not None:
            (theirs if binding.is_anothers else own).append(fitting)
        elif verdict.wait_us and not is_unused:
            # Fewer tokens do not help.
            return None
    least = min(own, default=0)
    return least if least > 0 and least <= min(theirs, default=least) else None


def decide(
    bindings: Sequence[Binding], counters: Mapping[CounterKey, Counter], demand: PricedDemand, now_us: int
) -> Decision:
    """Admit a request if every hard policy allows it. Raises RequestTooLarge or QuotaExceeded."""
    judged = verdicts(bindings, counters, demand, now_us)
    refused = refusal(judged, demand, now_us)
    if refused is not None:
        raise refused
    taken: dict[CounterKey, Counter] = {}
    charges, exceeded = [], []
    for verdict in judged:
        binding, counter, cost = verdict.binding, verdict.counter, verdict.cost
        if verdict.wait_us:
            exceeded.append(binding.policy)
            counter = counter.changed(exceeded=1)
        if binding.is_charged(cost, is_exceeded=verdict.wait_us > 0):
            counter = binding.take(counter, cost)
            charges.append(Charge(binding.policy.id, binding.window.start_us, cost))
        taken[binding.key] = counter
    limits = _limits([(binding, taken[binding.key]) for binding in bindings], now_us)
    return Decision(taken, tuple(charges), limits, tuple(exceeded))


def extend(
    held: Sequence[tuple[Charge, Binding | None]],
    counters: Mapping[CounterKey, Counter],
    demand: PricedDemand,
    now_us: int,
) -> tuple[dict[CounterKey, Counter], tuple[Charge, ...]] | None:
    """Extend a running request by `demand`. Return the changed counters and the charges, or None if refused.

    `held` pairs each charge with its binding, which is None if the limit has since been removed.
    """
    changed: dict[CounterKey, Counter] = {}
    charges = []
    for charge, binding in held:
        counter = None if binding is None else counters.get(binding.key)
        # Removed limits, and limits that do not depend on tokens, always allow more tokens.
        if binding is None or counter is None or not binding.is_extended:
            charges.append(charge)
            continue
        cost = demand.amounts[binding.metric.unit]
        counter = binding.current(counter, now_us)
        is_exceeded = binding.wait_us(counter, cost, now_us) > 0
        if is_exceeded and binding.is_hard:
            return None
        if is_exceeded:
            counter = counter.changed(exceeded=1)
        if binding.is_charged(cost, is_exceeded=is_exceeded):
            counter = binding.take(counter, cost)
            charge = Charge(charge.policy_id, charge.window_start_us, charge.amount + cost)
        changed[binding.key] = counter
        charges.append(charge)
    return changed, tuple(charges)


def _policy_header(binding: Binding) -> dict[str, str]:
    return {} if binding.is_anothers else {POLICY_HEADER: binding.policy.id}


def rate_limit_headers(limits: Sequence[RateLimit]) -> dict[str, str]:
    headers = {}
    for rate in limits:
        if rate.limit is not None:
            headers[f"x-ratelimit-limit-{rate.kind}"] = str(rate.limit)
        headers[f"x-ratelimit-remaining-{rate.kind}"] = str(rate.remaining)
        if rate.reset_us is not None:
            headers[f"x-ratelimit-reset-{rate.kind}"] = f"{-(-rate.reset_us // 1_000_000)}s"
    return headers


def exceeded_headers(exceeded: Sequence[QuotaPolicy]) -> dict[str, str]:
    """Return the header for exceeded soft limits. Callers never learn of shadow policies."""
    metrics = sorted({policy.metric for policy in exceeded if policy.mode == SOFT})
    return {EXCEEDED_HEADER: ", ".join(metrics)} if metrics else {}


def _limits(standing: Sequence[tuple[Binding, Counter]], now_us: int) -> tuple[RateLimit, ...]:
    """Return the tightest limits on requests per minute and on tokens per minute. Shadow policies do not count."""
    tightest: dict[str, RateLimit] = {}
    for binding, counter in standing:
        kind = _HEADER_KINDS.get(binding.policy.metric)
        if kind is None or binding.policy.mode == SHADOW:
            continue
        remaining = binding.remaining(counter)
        if kind not in tightest or remaining < tightest[kind].remaining:
            is_told = not binding.is_anothers
            reset_us = binding.reset_us(counter, now_us) if is_told else None
            tightest[kind] = RateLimit(kind, binding.policy.limit if is_told else None, remaining, reset_us)
    return tuple(tightest.values())
