"""A query for a report over the ledger."""

from __future__ import annotations

from dataclasses import dataclass

from loramux.migrations.schema import SERIES
from loramux.platform.errors import InvalidRequest
from loramux.platform.ledger.grains import DAY_US, HOUR_US, MINUTE_US, Grain, grains_for
from loramux.platform.ledger.ranges import BUCKET_US
from loramux.platform.periods import is_timezone

MAX_BUCKETS = 10_000
MAX_LOCAL_DAYS = 800
LAST_LOCAL_US = 221_845_392_000_000_000
"""1 January 9000, in microseconds since 1970. Python's calendar ends with the year 9999."""
MAX_SINGLE_US = 31 * DAY_US
"""Longest range, in microseconds, of a report by end user, or of a report by minute if its groups have no sums per
minute.
"""
MAX_SINGLE_OF_ALL_US = DAY_US + HOUR_US
"""The same limit for reports over all tenants: 24 hours, plus one hour for rounding a day outward to whole hours."""

MAX_SUMMED = 1_000_000
"""Maximum number of rows from the ledger and its rollups that one report sums."""
MAX_SUMMED_BY_END_USER = 100_000
"""The same limit for reports by end user. It is lower, because a tenant's clients control the number of end users."""

_SHORT_NAMES = {"tenant_id": "tenant", "api_key_id": "key", "adapter_id": "adapter", "adapter_version_id": "version"}
GROUPED_BY = {_SHORT_NAMES.get(column, column): column for column in SERIES}
GROUPS = tuple(GROUPED_BY)


@dataclass(frozen=True, slots=True, kw_only=True)
class UsageQuery:
    """A query for sums of the requests that finished in `[start_us, end_us)`, by bucket and group.

    If `tenant_id` is None, the sums cover all tenants. If `adapter_ids` is None, they cover all adapters and the base.
    `bucket` is `1m`, `1h`, `1d`, or None for the whole range. The first and last buckets are cut to the range. Days
    begin at midnight in `timezone`. Raises InvalidRequest with the field's name.
    """

    tenant_id: str | None
    start_us: int
    end_us: int
    bucket: str | None = None
    group_by: tuple[str, ...] = ()
    timezone: str = "UTC"
    adapter_ids: frozenset[str] | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.start_us < 2**62:
            raise InvalidRequest("start must not be before 1970", param="start")
        if not self.start_us < self.end_us < 2**62:
            raise InvalidRequest("end must be after start", param="end")
        if self.bucket is not None and self.bucket not in BUCKET_US:
            raise InvalidRequest(f"bucket must be one of {', '.join(BUCKET_US)}", param="bucket")
        if set(self.group_by) - set(GROUPS) or len(set(self.group_by)) != len(self.group_by):
            raise InvalidRequest(f"group_by takes {', '.join(GROUPS)}, each at most once", param="group_by")
        if not is_timezone(self.timezone):
            raise InvalidRequest("unknown timezone: use an IANA name such as Europe/Berlin", param="timezone")
        self._check_size()

    def _check_size(self) -> None:
        if self.has_local_days and self.end_us > LAST_LOCAL_US:
            raise InvalidRequest("local days are supported until the year 9000", param="end")
        length_us = self.end_us - self.start_us
        if self.bucket is not None and length_us // BUCKET_US[self.bucket] > MAX_BUCKETS:
            raise InvalidRequest(f"the range has more than {MAX_BUCKETS} buckets of {self.bucket}", param="bucket")
        if self.has_local_days and length_us // DAY_US > MAX_LOCAL_DAYS:
            raise InvalidRequest(f"a report by local days can span at most {MAX_LOCAL_DAYS} days", param="start")
        is_by_minute = self.bucket == "1m" and MINUTE_US not in self.grains()
        if not is_by_minute and "end_user" not in self.group_by:
            return
        what = "by end user" if "end_user" in self.group_by else "by minute"
        if length_us > MAX_SINGLE_US:
            raise InvalidRequest(f"a report {what} can span at most {MAX_SINGLE_US // DAY_US} days", param="start")
        if self.tenant_id is None and length_us > MAX_SINGLE_OF_ALL_US:
            raise InvalidRequest(f"a report {what} over more than 25 hours needs a tenant", param="tenant")

    @property
    def has_local_days(self) -> bool:
        return self.bucket == "1d" and self.timezone != "UTC"

    @property
    def max_summed(self) -> int:
        return MAX_SUMMED_BY_END_USER if "end_user" in self.group_by else MAX_SUMMED

    def grains(self) -> dict[int, Grain]:
        of_tenant = () if self.tenant_id is None else ("tenant_id",)
        of_adapters = () if self.adapter_ids is None else ("adapter_id",)
        return grains_for([*of_tenant, *of_adapters, *(GROUPED_BY[name] for name in self.group_by)])
