from __future__ import annotations

import asyncio
import os
import random
import re
import signal
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import httpx
import pytest
from sqlalchemy import select

from loramux.migrations import schema
from loramux.platform.generation.settlement_spool import LEFT
from loramux.platform.quotas.policies import QuotaPolicies
from tests.conformance.gateway_lab import PATIENCE_S, GatewayLab, Truth, ask, gateway_lab, until
from tests.platform.small_disk import BALLAST, empty_log, fill, mounted

NUM_RUNS = int(os.environ.get("LORAMUX_DISK_RUNS", "100"))
SEED = int(os.environ.get("LORAMUX_DISK_SEED", "0")) or random.SystemRandom().randrange(1, 10**9)
DISK_MB = 32
SPOOL_MB = 1

pytestmark = pytest.mark.campaign

Answers = list[tuple[int, bytes]]


class FillingDisk:
    """The disk contains the database and the gateways' data and logs."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.database = directory / "loramux.db"

    def fill(self, *, is_log_empty: bool) -> None:
        """Fill the disk. With `is_log_empty`, leave no free space within SQLite's write-ahead log either."""
        if is_log_empty:
            empty_log(self.database)
        fill(self.directory)

    def free(self) -> None:
        with suppress(FileNotFoundError):
            (self.directory / BALLAST).unlink()


@pytest.fixture
def disk() -> Iterator[FillingDisk]:
    with tempfile.TemporaryDirectory(prefix="loramux-disk-") as name, mounted(name, DISK_MB):
        yield FillingDisk(Path(name))


@pytest.fixture
def lab(disk: FillingDisk, demo_base: Path) -> Iterator[GatewayLab]:
    """A lab with two gateways. The second gateway's spool is full, so its settlements wait in memory."""
    spool = disk.directory / "gateway-1" / "spool"
    spool.mkdir(parents=True)
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="loramux-lab-")))
        stack.enter_context(mounted(spool, SPOOL_MB))
        fill(spool)
        yield stack.enter_context(gateway_lab(directory, f"sqlite:///{disk.database}", demo_base, 2, disk.directory))


async def run_once(lab: GatewayLab, disk: FillingDisk, key: str, dice: random.Random) -> Answers:
    """Run streams that begin at random moments, while the disk is filled and freed at other random moments."""

    async def stream(number: int) -> tuple[int, bytes]:
        await asyncio.sleep(dice.uniform(0, 0.5))
        return await ask(lab.gateways[number % 2].port, key, dice.randint(1, 80))

    async def fill_and_free() -> None:
        for _ in range(dice.randint(1, 3)):
            await asyncio.sleep(dice.uniform(0, 0.5))
            await asyncio.to_thread(disk.fill, is_log_empty=dice.random() < 0.7)
            await asyncio.sleep(dice.uniform(0, 0.7))
            disk.free()

    streams = asyncio.gather(*(stream(number) for number in range(dice.randint(3, 8))))
    await fill_and_free()
    return await streams


def num_in_memory(lab: GatewayLab) -> int:
    ports = [gateway.settings["admin_port"] for gateway in lab.gateways]
    texts = [httpx.get(f"http://127.0.0.1:{port}/metrics", trust_env=False).text for port in ports]
    return sum(int(float(re.findall(r"^loramux_held_settlements (\S+)$", text, re.MULTILINE)[0])) for text in texts)


def test_a_disk_that_fills_and_empties_costs_no_token(lab: GatewayLab, disk: FillingDisk) -> None:
    tenant, key = lab.account("disk")
    QuotaPolicies(lab.database).set(tenant.id, "tokens_per_minute", 10**9)
    print(f"\nLORAMUX_DISK_SEED={SEED}")
    dice = random.Random(SEED)
    told: dict[str, int] = {}
    num_refused = num_held = num_spooled = 0
    started_s = time.monotonic()
    for number in range(NUM_RUNS):
        answers = asyncio.run(run_once(lab, disk, key, dice))
        num_held += num_in_memory(lab)
        num_spooled += (disk.directory / "gateway-0" / "spool" / "settlements.jsonl").read_bytes()[:1] != b"\0"
        for gateway in lab.gateways:
            lab.wait_ready(gateway)
        lab.wait_settled()
        truths = lab.truths()
        with lab.database.read() as connection:
            events = {row.request_id: row for row in connection.execute(select(schema.usage_events))}
            assert connection.execute(select(schema.usage_adjustments)).all() == [], "nothing was recovered"
        for status, answer in answers:
            request_id = re.findall(rb"x-request-id: (\S+)", answer)[0].decode()
            if status == 503:
                assert b"quota_unavailable" in answer, (number, answer)
                num_refused += 1
                continue
            assert status == 200, (number, answer)
            assert b"[DONE]" in answer, (number, answer)
            [usage] = re.findall(rb'"completion_tokens":(\d+)', answer)
            told[request_id] = int(usage)
        ran = {key: event for key, event in events.items() if event.status != "aborted"}
        assert {key: event.completion_tokens for key, event in ran.items()} == told, number
        for request_id, event in events.items():
            assert Truth(event.prompt_tokens, event.completion_tokens) == truths[request_id], (number, request_id)
        lab.check_nothing_held()
    took_s = time.monotonic() - started_s
    print(
        f"{NUM_RUNS} runs, {len(told)} streams of {sum(told.values())} tokens all in the ledger, "
        f"{num_refused} requests refused, {num_spooled} runs ended with settlements in the spool, "
        f"{num_held} settlements waited in memory at the ends of runs, {took_s / NUM_RUNS:.1f} s a run"
    )
    assert took_s < NUM_RUNS * PATIENCE_S


def test_a_gateway_that_is_stopped_logs_what_it_cannot_settle_and_settles_it_from_there(
    lab: GatewayLab, disk: FillingDisk, tmp_path: Path
) -> None:
    tenant, key = lab.account("stopped")
    gateway = lab.gateways[1]
    lab.kill(gateway)
    log = tmp_path / "log"
    gateway.settings["log"] = str(log)
    lab.start(gateway)
    lab.wait_ready(gateway)

    async def stream_into_trouble() -> Answers:
        streams = asyncio.gather(*(ask(gateway.port, key, 60) for _ in range(3)))
        await asyncio.sleep(0.3)
        await asyncio.to_thread(disk.fill, is_log_empty=True)
        return await streams

    answers = asyncio.run(stream_into_trouble())
    assert all(b"[DONE]" in answer for _, answer in answers)
    os.kill(gateway.pid, signal.SIGTERM)
    until(lambda: not Path(f"/proc/{gateway.pid}").exists(), log.read_text)
    records = re.findall(r"record='([0-9a-f]{8} \{.*?\}\S*)'", log.read_text())
    assert len(records) == 3
    disk.free()
    spool = disk.directory / "gateway-1" / "spool"
    (spool / BALLAST).unlink()
    (spool / LEFT).write_text("\n".join(records))
    lab.start(gateway)
    lab.wait_ready(gateway)
    lab.wait_settled()
    with lab.database.read() as connection:
        events = connection.execute(select(schema.usage_events).where(schema.usage_events.c.tenant_id == tenant.id))
        assert [event.completion_tokens for event in events] == [60] * 3
    lab.check_nothing_held()
