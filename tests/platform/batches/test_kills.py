"""A server that is killed again and again while it runs a batch."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from loramux.adapter_store.blobs.local import LocalBlobStore
from loramux.migrations.database import Database
from loramux.platform.accounts.api_keys import ApiKeys
from loramux.platform.accounts.tenants import Tenants
from loramux.platform.batches.batch_rows import Batch, Batches, NewBatch
from loramux.platform.batches.tenant_files import Owner, TenantFile, TenantFiles
from tests.platform.batches.batch_lab import CHAT, content_of, events_of, line

pytestmark = [pytest.mark.anyio, pytest.mark.campaign]

NUM_LINES = int(os.environ.get("LORAMUX_BATCH_LINES", "500"))
LINES_PER_KILL = 25


@asynccontextmanager
async def server(url: str, directory: Path) -> AsyncIterator[None]:
    """Run a server and kill it at the end."""
    arguments = ("-m", "tests.platform.batches.batch_server", url, str(directory / "blobs"), str(directory))
    process = await asyncio.create_subprocess_exec(sys.executable, *arguments, stdout=asyncio.subprocess.PIPE)
    assert process.stdout is not None
    assert await process.stdout.readline() == b"runs\n"
    try:
        yield
    finally:
        assert process.returncode is None
        process.send_signal(signal.SIGKILL)
        await process.wait()
        # The test's end closes the pipe otherwise, after the event loop.
        await process.stdout.read()


async def test_killed_servers_lose_and_repeat_nothing(
    accounts: Database, sqlite_accounts_url: str, tmp_path: Path
) -> None:
    (tmp_path / "blobs").mkdir()
    files = TenantFiles(accounts, LocalBlobStore(tmp_path / "blobs"), tmp_path)
    batches, tenant = Batches(accounts, files), Tenants(accounts).create("acme")
    owner = Owner(tenant.id, ApiKeys(accounts).create(tenant.id, "test").key.id, is_limited=False)
    (tmp_path / "in").write_bytes(content_of([line(f"{number}") for number in range(NUM_LINES)]))
    file = files.create(owner, "in", tmp_path / "in")
    batch = batches.create(owner, NewBatch(CHAT, file.id, {}))

    async def reached(num_completed: int) -> Batch:
        async with asyncio.timeout(60):
            while (found := batches.get(owner, batch.id)).num_completed < num_completed:  # noqa: ASYNC110
                await asyncio.sleep(0.005)
        return found

    for target in range(LINES_PER_KILL, NUM_LINES, LINES_PER_KILL):
        async with server(sqlite_accounts_url, tmp_path):
            await reached(target)
    async with server(sqlite_accounts_url, tmp_path), asyncio.timeout(60):
        while not (found := batches.get(owner, batch.id)).is_finished:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    assert (found.state, found.num_completed, found.num_failed) == ("completed", NUM_LINES, 0)
    answers = [json.loads(one) for one in content_of_file(files, owner, found.output_file_id, tmp_path).splitlines()]
    assert [one["custom_id"] for one in answers] == [f"{number}" for number in range(NUM_LINES)]
    charged = {event.request_id: event for event in events_of(accounts) if event.prompt_tokens}
    assert charged.keys() == {one["response"]["request_id"] for one in answers}
    for one in answers:
        event, usage = charged[one["response"]["request_id"]], one["response"]["body"]["usage"]
        assert (event.prompt_tokens, event.completion_tokens) == (usage["prompt_tokens"], usage["completion_tokens"])


def content_of_file(files: TenantFiles, owner: Owner, file_id: str | None, directory: Path) -> bytes:
    assert file_id is not None
    found: TenantFile = files.get(owner, file_id)
    files.fetch(found, directory / "fetched")
    return (directory / "fetched").read_bytes()
