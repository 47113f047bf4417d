"""Engines of one server are killed under load: unstarted requests run on the other engine, and bills are exact."""

from __future__ import annotations

import asyncio
import os
import random
import tempfile
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from loramux.platform.quotas.policies import QuotaPolicies
from tests.conformance.engines_lab import NUM_ENGINES, EnginesLab
from tests.conformance.fleet_streams import Stream, is_billed_as_received, numbered_stream, send_stream
from tests.conformance.gateway_lab import make_lab_base
from tests.postgres import create_database
from tests.reliability.record import recorded

NUM_KILLS = int(os.environ.get("LORAMUX_ENGINE_KILLS", "10"))
NUM_STREAMS = 32

pytestmark = [pytest.mark.campaign, pytest.mark.data_parallel]


@pytest.fixture(scope="module")
def lab(postgres_server: str, demo_base: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EnginesLab]:
    model = make_lab_base(tmp_path_factory.mktemp("base"), demo_base)
    url = create_database(postgres_server, "killed_engines")
    with (
        tempfile.TemporaryDirectory(prefix="loramux-lab-") as directory,
        closing(EnginesLab(Path(directory), url, model, 1)) as lab,
    ):
        yield lab


def test_engines_killed_under_streams_lose_no_unstarted_request(lab: EnginesLab) -> None:
    tenant, key = lab.account("engines")
    QuotaPolicies(lab.database).set(tenant.id, "tokens_per_minute", 10**9)
    [server] = lab.gateways
    dice = random.Random(1)
    streams: list[Stream] = []
    num_hit = 0

    async def kill_under_load() -> list[Stream]:
        names = ("base", "plain", "caller", "quiet")
        requests = [numbered_stream(dice, dice.choice(names)) for _ in range(NUM_STREAMS)]
        load = [asyncio.create_task(send_stream(server, key, request)) for request in requests]
        await asyncio.sleep(dice.uniform(0.1, 0.6))
        await asyncio.to_thread(lab.kill_one_engine, server, dice.randrange(NUM_ENGINES))
        return await asyncio.gather(*load)

    for _ in range(NUM_KILLS):
        found = asyncio.run(kill_under_load())
        num_hit += any(one.is_ended_by_error for one in found)
        streams += found
    lab.wait_settled()
    total = lab.check_bills(tenant.id, [(one.status, one.answer) for one in streams])
    events = lab.events_of(tenant.id)
    unkept = [one for one in streams if not one.is_complete and not (one.is_ended_by_error and one.num_received)]
    wrong = [one for one in streams if not is_billed_as_received(one, events)]
    print(
        f"\n{NUM_KILLS} kills of one of {NUM_ENGINES} engines, {num_hit} in mid-stream; {len(streams)} streams, "
        f"{sum(one.is_ended_by_error for one in streams)} ended by an error, {len(unkept)} not as promised; "
        f"{total} tokens, {len(wrong)} wrong bills"
    )
    assert num_hit > NUM_KILLS // 2
    with recorded("kills", kills=NUM_KILLS, lost=len(unkept), undercounted=len(wrong)):
        assert unkept == [], "an unstarted request did not complete, or a started one did not end with an error"
        assert wrong == []
