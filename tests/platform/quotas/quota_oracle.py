"""A model of quotas in plain dictionaries. Admission on a database must agree with it after every step.

The model shares no code with the platform. Windows are local dates, and sums are recomputed from the requests each
time.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import UTC, datetime
from zoneinfo import ZoneInfo

MINUTE_US = 60_000_000
LEASE_US = 30_000_000
PROMPT, CACHED, COMPLETION = 1_234_567, 345_678, 7_654_321
"""Prices in nanos per million tokens, which are not round numbers, so that rounding errors show."""


BATCH_PERCENT = 37
"""What batches pay of these prices."""
TOKENS = ("tokens", "batch_tokens")


def cost(prompt: int, cached: int, completion: int, is_batch: bool = False) -> int:
    percent = BATCH_PERCENT if is_batch else 100
    prices = [-(-price * percent // 100) for price in (PROMPT, CACHED, COMPLETION)]
    nanos = (prompt - cached) * prices[0] + cached * prices[1] + completion * prices[2]
    return -(-nanos // 1_000_000)


@dataclass
class Policy:
    """Reservations can exceed a limit that was lowered."""

    id: str
    subject: str
    metric: str
    limit: int
    burst: int
    mode: str
    has_changed: bool = False

    @property
    def is_rate(self) -> bool:
        return self.metric.endswith("_per_minute")

    @property
    def is_budget(self) -> bool:
        return self.metric.endswith(("_per_day", "_per_month"))


@dataclass
class Bucket:
    """`level` is in 1/60,000,000 of a token or request."""

    level: int
    at_us: int

    def now(self, policy: Policy, now_us: int) -> Bucket:
        full = policy.burst * MINUTE_US
        if self.at_us > now_us + MINUTE_US:
            # The clock was wrong. Undo the refill of minutes that are still to come, but forgive the tokens used in
            # them.
            early = policy.limit * (self.at_us - now_us)
            return Bucket(min(full, self.level - min(early, max(0, self.level))), now_us)
        at_us = max(self.at_us, now_us)
        return Bucket(min(full, self.level + policy.limit * (at_us - self.at_us)), at_us)


Count = tuple[str, str, tuple[int, ...]]
"""A policy, a subject, and the local date or month. The date is empty if the policy has no window."""


@dataclass
class Request:
    id: str
    tenant: str
    prompt: int
    completion: int
    """Tokens granted in addition to the prompt."""
    lease_us: int
    is_batch: bool = False
    held: dict[Count, int] = field(default_factory=dict)
    state: str = "open"
    checkpoint: int = 0
    charged: tuple[int, int, int] = (0, 0, 0)
    """Prompt, cached and completion tokens that the ledger must show."""
    corrected: int = 0
    """Tokens that a late settlement added."""
    corrected_nanos: int = 0


class QuotaOracle:
    def __init__(self, zones: dict[str, str], owners: dict[str, str]) -> None:
        self.zones = {tenant: ZoneInfo(zone) for tenant, zone in zones.items()}
        self.owners = owners
        self.policies: dict[tuple[str, str], Policy] = {}
        self.buckets: dict[Count, Bucket] = {}
        self.exceeded: dict[Count, int] = {}
        self.requests: dict[str, Request] = {}

    def set_policy(self, policy: Policy, now_us: int) -> None:
        old = self.policies.get((policy.subject, policy.metric))
        self.policies[policy.subject, policy.metric] = policy
        if old is None:
            if policy.is_rate and policy.subject != "platform":
                self.buckets[policy.id, policy.subject, ()] = Bucket(policy.burst * MINUTE_US, now_us)
            return
        policy.has_changed = True
        if policy.is_rate and policy.subject != "platform":
            for count in [count for count in self.buckets if count[0] == policy.id]:
                earned = self.buckets[count].now(old, now_us)
                self.buckets[count] = Bucket(min(earned.level, policy.burst * MINUTE_US), earned.at_us)

    def delete_policy(self, subject: str, metric: str) -> None:
        policy = self.policies.pop((subject, metric))
        for counts in (self.buckets, self.exceeded):
            for count in [count for count in counts if count[0] == policy.id]:
                del counts[count]

    def binding(
        self, tenant: str, key: str, adapter: str | None, now_us: int, is_batch: bool
    ) -> list[tuple[Policy, Count]]:
        own = {
            metric
            for (subject, metric), policy in self.policies.items()
            if subject == tenant and policy.mode != "shadow"
        }
        found = []
        for (subject, metric), policy in self.policies.items():
            if metric.startswith("batch") and not is_batch:
                continue
            is_inherited = subject == "platform" and metric not in own
            if subject in (tenant, key, adapter) or is_inherited:
                # Calls to another tenant's adapter do not count against the owner's limit.
                is_own = subject == tenant or self.owners.get(subject) == tenant
                counted = subject if is_own else tenant
                found.append((policy, (policy.id, counted, self.window(policy, counted, now_us))))
        return found

    def window(self, policy: Policy, subject: str, now_us: int) -> tuple[int, ...]:
        if not policy.is_budget:
            return ()
        # Days follow the time zone of the tenant that set the limit. For the platform's limits, they follow each
        # tenant's own time zone.
        zone = self.zones[subject if policy.subject == "platform" else self.owners.get(policy.subject, policy.subject)]
        local = datetime.fromtimestamp(now_us // 1_000_000, UTC).astimezone(zone)
        return (local.year, local.month, local.day) if policy.metric.endswith("_day") else (local.year, local.month)

    def price(self, policy: Policy, prompt: int, completion: int, is_batch: bool) -> int:
        if policy.metric.startswith(TOKENS):
            return prompt + completion
        return cost(prompt, 0, completion, is_batch) if policy.metric.startswith("cost") else 1

    def fits(self, policy: Policy, count: Count, wanted: int, now_us: int) -> bool:
        if policy.is_rate:
            return self.bucket(policy, count, now_us).level >= (self.reserved(count) + wanted) * MINUTE_US
        return self.used(policy, count) + self.reserved(count) + wanted <= policy.limit

    def admit(self, request: Request, bound: list[tuple[Policy, Count]], now_us: int) -> set[str]:
        """Record the amounts that an admitted request holds, and return the policies that it exceeds."""
        beyond = set()
        for policy, count in bound:
            wanted = self.price(policy, request.prompt, request.completion, request.is_batch)
            is_exceeded = not self.fits(policy, count, wanted, now_us)
            self.touch(policy, count, now_us)
            if is_exceeded:
                beyond.add(policy.id)
                self.exceeded[count] = self.exceeded.get(count, 0) + 1
            if policy.is_budget or not is_exceeded:
                request.held[count] = wanted
                if policy.metric == "requests_per_minute":
                    self.buckets[count].level -= MINUTE_US
        self.requests[request.id] = request
        return beyond

    def refuse(self, bound: list[tuple[Policy, Count]], now_us: int) -> None:
        """A refusal charges nothing, but it corrects the time of a bucket."""
        for policy, count in bound:
            if count in self.buckets and self.buckets[count].at_us > now_us + MINUTE_US:
                self.touch(policy, count, now_us)

    def extend(self, request: Request, tokens: int, now_us: int) -> bool:
        wanted = [
            (
                policy,
                count,
                self.price(policy, 0, tokens, request.is_batch),
                self.fits(policy, count, self.price(policy, 0, tokens, request.is_batch), now_us),
            )
            for policy, count in self.holding(request)
            if policy.metric.startswith((*TOKENS, "cost"))
        ]
        if any(not fits and policy.mode == "hard" for policy, _, _, fits in wanted):
            # Buckets of requests are not read here, so their time stays wrong until the next admission.
            self.refuse([(policy, count) for policy, count, _, _ in wanted], now_us)
            return False
        for policy, count, more, fits in wanted:
            self.touch(policy, count, now_us)
            if not fits:
                self.exceeded[count] = self.exceeded.get(count, 0) + 1
            if fits or policy.is_budget:
                request.held[count] += more
        request.completion += tokens
        return True

    def close(self, request: Request, state: str, charged: tuple[int, int, int], has_run: bool, now_us: int) -> None:
        """Charge a request. If its recovery has already charged it, correct that charge."""
        was_recovered, before = request.state == "recovered", request.charged
        for policy, count in self.holding(request):
            if policy.metric == "requests_per_minute" and has_run:
                # The request was already charged to this limit at admission.
                continue
            self.touch(policy, count, now_us)
            if not policy.is_rate:
                continue
            bucket = self.buckets[count]
            if policy.metric == "requests_per_minute" and not has_run:
                bucket.level += MINUTE_US
            elif policy.metric == "tokens_per_minute":
                bucket.level -= (charged[0] + charged[2] - before[0] - before[2]) * MINUTE_US
            bucket.level = min(bucket.level, policy.burst * MINUTE_US)
        request.state, request.charged = state, charged
        if was_recovered:
            request.corrected = charged[0] + charged[2] - before[0] - before[2]
            request.corrected_nanos = cost(*charged, request.is_batch) - cost(*before, request.is_batch)

    def expired(self, now_us: int) -> list[Request]:
        """Open requests with an expired lease, or one that ends so late that a wrong clock must have set it."""
        return [
            request
            for request in self.requests.values()
            if request.state == "open" and not 0 <= request.lease_us - now_us <= 2 * LEASE_US
        ]

    def holding(self, request: Request) -> list[tuple[Policy, Count]]:
        by_id = {policy.id: policy for policy in self.policies.values()}
        return [(by_id[count[0]], count) for count in request.held if count[0] in by_id]

    def reserved(self, count: Count) -> int:
        policy = next(policy for policy in self.policies.values() if policy.id == count[0])
        if policy.metric == "requests_per_minute":
            return 0
        return sum(request.held.get(count, 0) for request in self.requests.values() if request.state == "open")

    def used(self, policy: Policy, count: Count) -> int:
        if not policy.is_budget:
            return 0
        closed = [one for one in self.requests.values() if one.state != "open" and count in one.held]
        if policy.metric.startswith("cost"):
            return sum(cost(*request.charged, request.is_batch) for request in closed)
        return sum(request.charged[0] + request.charged[2] for request in closed)

    def late(self, policy: Policy, count: Count) -> int:
        """The most that late settlements could have pushed usage over a limit."""
        requests = [request for request in self.requests.values() if count in request.held]
        if policy.metric.startswith("cost"):
            return sum(max(0, request.corrected_nanos) for request in requests)
        return sum(max(0, request.corrected) for request in requests)

    def bucket(self, policy: Policy, count: Count, now_us: int) -> Bucket:
        known = self.buckets.get(count)
        return Bucket(policy.burst * MINUTE_US, now_us) if known is None else known.now(policy, now_us)

    def touch(self, policy: Policy, count: Count, now_us: int) -> None:
        if policy.is_rate:
            self.buckets[count] = self.bucket(policy, count, now_us)
