"""The judgement of admission, without a database: what binds, what a request takes and what it gives back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from loramux.platform.buckets import UNITS, Bucket
from loramux.platform.errors import InvalidRequest, RateLimited
from loramux.platform.quotas import CONCURRENT_REQUESTS, REQUESTS_PER_MINUTE, TOKENS_PER_MINUTE, QuotaPolicy
from loramux.platform.reservations import RateLimit, Settlement

RETRY_CONCURRENCY_S = 1.0
RETRY_NEVER_S = 3600.0
_KINDS = {REQUESTS_PER_MINUTE: "requests", TOKENS_PER_MINUTE: "tokens"}


class QuotaExceeded(RateLimited):
    """A policy does not admit the request now."""

    def __init__(self, policy: QuotaPolicy, wait_s: float, limits: tuple[RateLimit, ...]) -> None:
        super().__init__(
            f"the limit of {policy.limit} for {policy.metric} is reached",
            param=policy.metric,
            # A limit of zero does not pass with time.
            code="insufficient_quota" if policy.limit == 0 else None,
            retry_after_s=wait_s,
            headers=rate_limit_headers(limits),
        )
        self.policy = policy
        self.wait_s = wait_s


class RequestTooLarge(InvalidRequest):
    """The request costs more than a policy ever admits at once; waiting does not help."""

    code = "request_too_large"

    def __init__(self, policy: QuotaPolicy, cost: int) -> None:
        super().__init__(
            f"the request may use {cost} tokens, but {policy.metric} admits at most {policy.burst} at once: "
            "shorten the prompt or lower max_tokens",
            param="max_tokens",
        )
        self.policy = policy


@dataclass(frozen=True, slots=True)
class Charge:
    """What a reservation holds of one counter."""

    policy_id: str
    window_start_us: int
    amount: int

    def as_json(self) -> dict[str, Any]:
        return {"policy_id": self.policy_id, "window_start_us": self.window_start_us, "amount": self.amount}

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> Charge:
        return cls(document["policy_id"], document["window_start_us"], document["amount"])


@dataclass(frozen=True, slots=True)
class Decision:
    """The counters after the request was admitted, what it holds of each, and what is left."""

    buckets: dict[str, Bucket]
    charges: tuple[Charge, ...]
    limits: tuple[RateLimit, ...]


def decide(
    policies: Sequence[QuotaPolicy], buckets: Mapping[str, Bucket], reserved_tokens: int, now_us: int
) -> Decision:
    """Admit a request under every policy or raise: for a cost that none ever admits, else for the longest wait."""
    current = {policy.id: _refilled(policy, buckets[policy.id], now_us) for policy in policies}
    for policy in policies:
        cost = _cost(policy, reserved_tokens)
        if policy.metric != CONCURRENT_REQUESTS and policy.limit > 0 and cost > policy.burst:
            raise RequestTooLarge(policy, cost)
    limits = _limits(policies, current)
    refusals = [
        QuotaExceeded(policy, wait_s, limits)
        for policy in policies
        if (wait_s := _wait_s(policy, current[policy.id], _cost(policy, reserved_tokens))) > 0
    ]
    if refusals:
        raise max(refusals, key=lambda refusal: refusal.wait_s)
    taken = {policy.id: _take(policy, current[policy.id], reserved_tokens) for policy in policies}
    charges = tuple(Charge(policy.id, 0, _cost(policy, reserved_tokens)) for policy in policies)
    return Decision(taken, charges, _limits(policies, taken))


def extend(
    policies: Mapping[str, QuotaPolicy],
    buckets: Mapping[str, Bucket],
    charges: Sequence[Charge],
    tokens: int,
    now_us: int,
) -> tuple[dict[str, Bucket], tuple[Charge, ...]] | None:
    """The counters and what the request holds of them after it got so many tokens more; None where one refuses."""
    changed: dict[str, Bucket] = {}
    held = []
    for charge in charges:
        policy = policies.get(charge.policy_id)
        # What is no longer limited, or not by tokens, has nothing against more tokens.
        if policy is None or policy.metric != TOKENS_PER_MINUTE:
            held.append(charge)
            continue
        bucket = _refilled(policy, buckets[policy.id], now_us)
        if bucket.free_units < tokens * UNITS:
            return None
        changed[policy.id] = Bucket(bucket.level, bucket.reserved + tokens, bucket.refilled_us)
        held.append(Charge(charge.policy_id, charge.window_start_us, charge.amount + tokens))
    return changed, tuple(held)


def give_back(policy: QuotaPolicy, bucket: Bucket, charge: Charge, settlement: Settlement, now_us: int) -> Bucket:
    """The counter after a request settled: what it held is released and what it used is gone."""
    bucket = _refilled(policy, bucket, now_us)
    if policy.metric == REQUESTS_PER_MINUTE:
        returned = 0 if settlement.has_run else charge.amount * UNITS
        return Bucket(min(policy.burst * UNITS, bucket.level + returned), bucket.reserved, bucket.refilled_us)
    if policy.metric == TOKENS_PER_MINUTE:
        return Bucket(bucket.level - settlement.tokens * UNITS, bucket.reserved - charge.amount, bucket.refilled_us)
    return Bucket(bucket.level, bucket.reserved - charge.amount, bucket.refilled_us)


def correct(
    policy: QuotaPolicy, bucket: Bucket, charge: Charge, charged: Settlement, truth: Settlement, now_us: int
) -> Bucket:
    """The counter after a request that was charged by a guess turned out to have cost something else."""
    bucket = _refilled(policy, bucket, now_us)
    level = bucket.level
    if policy.metric == TOKENS_PER_MINUTE:
        level += (charged.tokens - truth.tokens) * UNITS
    elif policy.metric == REQUESTS_PER_MINUTE and not truth.has_run:
        level += charge.amount * UNITS
    else:
        return bucket
    return Bucket(min(policy.burst * UNITS, level), bucket.reserved, bucket.refilled_us)


def rate_limit_headers(limits: Sequence[RateLimit]) -> dict[str, str]:
    headers = {}
    for rate in limits:
        headers[f"x-ratelimit-limit-{rate.kind}"] = str(rate.limit)
        headers[f"x-ratelimit-remaining-{rate.kind}"] = str(rate.remaining)
        headers[f"x-ratelimit-reset-{rate.kind}"] = f"{-(-rate.reset_us // 1_000_000)}s"
    return headers


def _refilled(policy: QuotaPolicy, bucket: Bucket, now_us: int) -> Bucket:
    if policy.metric == CONCURRENT_REQUESTS:
        return bucket
    return bucket.refilled(policy.limit, policy.burst, now_us)


def _cost(policy: QuotaPolicy, reserved_tokens: int) -> int:
    return reserved_tokens if policy.metric == TOKENS_PER_MINUTE else 1


def _wait_s(policy: QuotaPolicy, bucket: Bucket, cost: int) -> float:
    """How long until the policy admits `cost`: 0 when it does now."""
    if policy.metric == CONCURRENT_REQUESTS:
        if bucket.reserved + cost <= policy.limit:
            return 0.0
        return RETRY_CONCURRENCY_S if policy.limit else RETRY_NEVER_S
    if bucket.free_units >= cost * UNITS:
        return 0.0
    # Without a refill, waiting would be waiting for the operator.
    return bucket.wait_us(cost, policy.limit) / 1_000_000 if policy.limit else RETRY_NEVER_S


def _take(policy: QuotaPolicy, bucket: Bucket, reserved_tokens: int) -> Bucket:
    cost = _cost(policy, reserved_tokens)
    if policy.metric == REQUESTS_PER_MINUTE:
        return Bucket(bucket.level - cost * UNITS, bucket.reserved, bucket.refilled_us)
    return Bucket(bucket.level, bucket.reserved + cost, bucket.refilled_us)


def _limits(policies: Sequence[QuotaPolicy], buckets: Mapping[str, Bucket]) -> tuple[RateLimit, ...]:
    return tuple(
        RateLimit(
            kind=_KINDS[policy.metric],
            limit=policy.limit,
            remaining=buckets[policy.id].remaining,
            reset_us=_reset_us(policy, buckets[policy.id]),
        )
        for policy in policies
        if policy.metric in _KINDS
    )


def _reset_us(policy: QuotaPolicy, bucket: Bucket) -> int:
    return bucket.wait_us(policy.burst, policy.limit) if policy.limit else 0
