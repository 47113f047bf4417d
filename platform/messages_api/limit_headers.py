"""Rate limits in Anthropic's headers (https://platform.claude.com/docs/en/api/rate-limits#response-headers)."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

from starlette.datastructures import MutableHeaders


def add_limit_headers(headers: MutableHeaders) -> None:
    """Repeat `x-ratelimit-*` as `anthropic-ratelimit-*`. A reset is a time instead of a number of seconds."""
    for kind in ("requests", "tokens"):
        limit = headers.get(f"x-ratelimit-limit-{kind}")
        if limit is not None:
            reset_s = int(headers[f"x-ratelimit-reset-{kind}"].removesuffix("s"))
            reset = datetime.now(UTC).replace(microsecond=0) + timedelta(seconds=reset_s)
            headers[f"anthropic-ratelimit-{kind}-limit"] = limit
            headers[f"anthropic-ratelimit-{kind}-remaining"] = headers[f"x-ratelimit-remaining-{kind}"]
            headers[f"anthropic-ratelimit-{kind}-reset"] = reset.strftime("%Y-%m-%dT%H:%M:%SZ")
