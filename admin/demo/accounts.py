"""The demo's tenants: each has a quota, an API key and an adapter, and gets a bill."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from loramux.admin.client.client import AdminClient, AdminError
from loramux.admin.client.push import PushedVersion, push_adapter
from loramux.admin.client.weights_push import WeightsPush
from loramux.admin.demo.server import DemoFailed, DemoServer

if TYPE_CHECKING:
    from loramux.admin.demo.mixed_batch import DemoAnswer

TOKENS_PER_MINUTE = 100_000


@dataclass(frozen=True, slots=True)
class Account:
    """A tenant with its API key and its adapter's version."""

    tenant: str
    api_key: str
    pushed: PushedVersion


def open_accounts(server: DemoServer, client: AdminClient, adapters: Mapping[str, Path]) -> list[Account]:
    """Open an account for each tenant with an adapter, and wait until the server has loaded all adapters."""
    with ThreadPoolExecutor(len(adapters) + 1) as threads:
        # Importing the official client takes a second, so import it while the server starts.
        batch = threads.submit(importlib.import_module, "loramux.admin.demo.mixed_batch")
        server.wait_until(client.is_alive, "listening")
        accounts = list(threads.map(lambda tenant: _open_account(client, tenant, adapters[tenant]), adapters))
        server.wait_until(client.is_ready, "ready")
        # The answers are short: an adapter loaded later than the others would miss the steps that they share.
        list(threads.map(lambda account: _load(server, account, adapters[account.tenant]), accounts))
        batch.result()
    return accounts


def _open_account(client: AdminClient, tenant: str, adapter: Path) -> Account:
    """Create the tenant, its quota, a key and its adapter over REST. The tenant may already exist."""
    try:
        client.post("tenants", {"slug": tenant})
    except AdminError as error:
        if error.code != "tenant_exists":
            raise
    client.post("quotas", {"tenant": tenant, "metric": "tokens_per_minute", "limit": TOKENS_PER_MINUTE})
    key = client.post("api_keys", {"tenant": tenant, "name": "demo"})
    return Account(tenant, key["secret"], push_adapter(client, adapter, tenant, adapter.name))


def _load(server: DemoServer, account: Account, adapter: Path) -> None:
    """Push the same files again, which creates no version but returns only when the engine has loaded it."""
    with WeightsPush(server.admin_url, server.admin_key, f"{account.tenant}/{adapter.name}") as push:
        push.push(adapter, wait="resident")


Bill = dict[tuple[str, str], tuple[int, int, int]]
"""Numbers of requests, prompt tokens and completion tokens by tenant and model."""


def read_bill(client: AdminClient) -> Bill:
    results = client.get("usage", group_by="tenant,model")["data"]
    return {
        (row["tenant"], row["model"]): (row["requests"], row["prompt_tokens"], row["completion_tokens"])
        for bucket in results
        for row in bucket["results"]
    }


def check_bill(console: Console, answers: list[DemoAnswer], before: Bill, after: Bill, base: str) -> None:
    """Raise DemoFailed unless the bill equals the usage reported in the answers, per tenant and model."""
    expected = dict(before)
    for answer in answers:
        name = (answer.question.tenant, answer.adapter or base)
        requests, prompt, completion = expected.get(name, (0, 0, 0))
        expected[name] = (requests + 1, prompt + answer.prompt_tokens, completion + answer.completion_tokens)
    if expected != after:
        raise DemoFailed(f"the usage report does not add up: {after} was billed instead of {expected}")
    num_tokens = sum(answer.prompt_tokens + answer.completion_tokens for answer in answers)
    console.print(f"It adds up: {len(answers)} answers cost {num_tokens} tokens, and exactly those were billed.\n")
