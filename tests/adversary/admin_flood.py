from __future__ import annotations

import asyncio
from collections import Counter

import httpx

NUM_AT_ONCE = 24
REPORTS = (
    "/admin/v1/usage?group_by=end_user",
    "/admin/v1/usage?group_by=end_user&top=1000",
)
CHEAP_CALLS = ("/admin/v1/adapters", "/admin/v1/jobs", "/admin/v1/adapters/ada_nothing", "/admin/v1/audit_log")
"""Paths that return a list, a 404 or a 403."""


async def flood_calls(
    admin_url: str, secret: str, seconds: float, paths: tuple[str, ...], num_at_once: int = NUM_AT_ONCE
) -> Counter[str]:
    """Keep `num_at_once` calls in flight for `seconds`.

    Count responses by status and error code, such as `400 report_too_large`, and failed connections by exception.
    """
    counts: Counter[str] = Counter()
    headers = {"authorization": f"Bearer {secret}"}
    limits = httpx.Limits(max_connections=num_at_once)
    async with httpx.AsyncClient(
        base_url=admin_url, headers=headers, trust_env=False, timeout=60, limits=limits
    ) as client:

        async def repeat(number: int) -> None:
            while True:
                try:
                    answer = await client.get(paths[number % len(paths)])
                    counts[_name(answer)] += 1
                except httpx.TransportError as error:
                    counts[type(error).__name__] += 1
                    await asyncio.sleep(0.1)

        try:
            async with asyncio.timeout(seconds):
                await asyncio.gather(*(repeat(number) for number in range(num_at_once)))
        except TimeoutError:
            pass
    return counts


def _name(answer: httpx.Response) -> str:
    if answer.is_success:
        return str(answer.status_code)
    return f"{answer.status_code} {answer.json()['error']['code']}"
