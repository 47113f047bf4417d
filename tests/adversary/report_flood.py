"""Floods `/usage` with reports on a great many end users, as one tenant's key may: an attack on everybody else.

Against a running server, with a key of a tenant whose ledger `many_end_users.py` has filled:

    python -m tests.adversary.report_flood http://127.0.0.1:8001 KEY --seconds 30
"""

from __future__ import annotations

import argparse
import asyncio
from collections import Counter
from dataclasses import dataclass

import httpx

NUM_AT_ONCE = 24
PATHS = (
    "/admin/v1/usage?group_by=end_user",
    "/admin/v1/usage?group_by=end_user&top=1000",
)


@dataclass(frozen=True, slots=True)
class FloodOutcome:
    """Answers by status and error code, such as `400 report_too_large`; connections that failed by their error."""

    counts: dict[str, int]

    def of_status(self, status: int) -> int:
        return sum(count for name, count in self.counts.items() if name.startswith(str(status)))


async def flood_reports(
    admin_url: str, secret: str, seconds: float, num_at_once: int = NUM_AT_ONCE, paths: tuple[str, ...] = PATHS
) -> FloodOutcome:
    """Keep `num_at_once` calls under way for so long; each asks again as soon as it is answered."""
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
    return FloodOutcome(dict(counts))


def _name(answer: httpx.Response) -> str:
    if answer.is_success:
        return str(answer.status_code)
    return f"{answer.status_code} {answer.json()['error']['code']}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("admin_url")
    parser.add_argument("secret", help="a key with the scope tenant:read")
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--at-once", type=int, default=NUM_AT_ONCE)
    parser.add_argument("--path", action="append", help="in place of the reports on end users; may be given again")
    options = parser.parse_args()
    paths = tuple(options.path or PATHS)
    outcome = asyncio.run(flood_reports(options.admin_url, options.secret, options.seconds, options.at_once, paths))
    for name, count in sorted(outcome.counts.items()):
        print(f"{count:8} {name}")


if __name__ == "__main__":
    main()
