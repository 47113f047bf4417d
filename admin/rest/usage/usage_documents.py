"""Response models of usage reports and ledger entries, for the OpenAPI document."""

from __future__ import annotations

from typing import Literal, NotRequired

from typing_extensions import TypedDict


class UsageResult(TypedDict):
    """The totals of one group, together with its `group_by` fields. Costs are in billionths of the currency."""

    object: Literal["usage.result"]
    requests: int
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    cost_nanos: int


class UsageTotal(TypedDict):
    """The totals of all groups."""

    requests: int
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    cost_nanos: int


class UsageBucket(TypedDict):
    """The usage totals of one interval, [start_time, end_time)."""

    object: Literal["bucket"]
    start_time: int
    end_time: int
    results: list[UsageResult]


class UsagePage(TypedDict):
    """A report, bucket by bucket. `num_results` and `total` are present only with `top`. They cover all groups."""

    object: Literal["page"]
    data: list[UsageBucket]
    has_more: bool
    next_page: str | None
    num_results: NotRequired[int]
    total: NotRequired[UsageTotal]


class CostsResult(TypedDict):
    """The cost of one group, together with its `group_by` fields."""

    object: Literal["costs.result"]
    requests: int
    amount_nanos: int
    amount: str
    currency: str | None


class CostsTotal(TypedDict):
    """The total cost of all groups."""

    requests: int
    amount_nanos: int
    amount: str
    currency: str | None


class CostsBucket(TypedDict):
    """The costs of one interval, [start_time, end_time)."""

    object: Literal["bucket"]
    start_time: int
    end_time: int
    results: list[CostsResult]


class CostsPage(TypedDict):
    """A cost report, bucket by bucket. `num_results` and `total` are present only with `top`. They cover all groups."""

    object: Literal["page"]
    data: list[CostsBucket]
    has_more: bool
    next_page: str | None
    currency: str | None
    num_results: NotRequired[int]
    total: NotRequired[CostsTotal]


class UsageEventDocument(TypedDict):
    """One settled request."""

    id: str
    object: Literal["usage.event"]
    tenant_id: str
    tenant: str
    api_key_id: str
    adapter_id: str | None
    adapter_version_id: str | None
    model: str
    base: str
    endpoint: str
    end_user: str | None
    service_tier: str
    status: str
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    cost_nanos: int
    price_id: str | None
    started_at: int
    finished_at: int
    time_to_first_token_us: int | None
    duration_us: int
