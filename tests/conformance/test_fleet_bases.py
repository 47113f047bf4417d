"""Traffic moves between two versions of a base in steps: no stream is cut, and each request has the right bill."""

from __future__ import annotations

import asyncio
import math
import os
import random
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import pytest

from loramux.platform.base_draw import drawn_order
from tests.conformance.bases_lab import NUM_OLD, BasesLab, make_new_version
from tests.conformance.fleet_streams import Stream, is_billed_as_received, numbered_stream, send_stream
from tests.conformance.gateway_lab import make_lab_base
from tests.postgres import create_database

SEED = int(os.environ.get("LORAMUX_FLEET_SEED", "1"))
STEP_S = float(os.environ.get("LORAMUX_FLEET_STEP_S", "12"))
"""How long each pair of weights is in force, in seconds."""
STEPS = ((100, 0), (50, 50), (0, 100), (50, 50))
LAG_S = 5.0
"""Longest time until all servers follow new weights, in seconds."""
NUM_TENANTS, NUM_CLIENTS = 16, 12
MODELS = ("base", "plain", "caller", "quiet")
NUM_DEVIATIONS = 5
"""Largest deviation from 50 % of the share of pairs of tenant and model, in standard deviations."""

pytestmark = [pytest.mark.campaign, pytest.mark.fleet]


@pytest.fixture(scope="module")
def lab(postgres_server: str, demo_base: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[BasesLab]:
    old = make_lab_base(tmp_path_factory.mktemp("old"), demo_base)
    new = make_new_version(tmp_path_factory.mktemp("new"), old)
    url = create_database(postgres_server, "moved_bases")
    with (
        tempfile.TemporaryDirectory(prefix="loramux-lab-") as directory,
        closing(BasesLab(Path(directory), url, old, new)) as lab,
    ):
        yield lab


@dataclass(frozen=True, slots=True, kw_only=True)
class Caller:
    tenant_id: str
    key: str
    adapter_ids: Mapping[str, str]

    def drawn(self, weights: Mapping[str, int], model: str) -> str:
        return drawn_order(weights, f"{self.tenant_id}:{self.adapter_ids.get(model, '')}")[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sent:
    caller: Caller
    model: str
    stream: Stream
    begin_s: float
    end_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    weights: Mapping[str, int]
    begin_s: float


def in_force(steps: list[Step], sent: Sent) -> list[Step]:
    """The steps whose weights a server can have used for the request."""
    ends = [*(step.begin_s for step in steps[1:]), math.inf]
    return [
        step
        for step, end_s in zip(steps, ends, strict=True)
        if step.begin_s <= sent.end_s and end_s + LAG_S >= sent.begin_s
    ]


def test_fleet_moves_traffic_between_bases_without_a_cut_stream(lab: BasesLab) -> None:
    callers = []
    for number in range(NUM_TENANTS):
        tenant, key = lab.account(f"moved-{number}")
        callers.append(Caller(tenant_id=tenant.id, key=key, adapter_ids=lab.adapter_ids(tenant.id)))
    dice = random.Random(SEED)
    sent: list[Sent] = []
    lab.divide(100, 0)
    lab.wait_connected()
    steps = [Step(weights=lab.divide(100, 0), begin_s=time.monotonic())]
    servers = list(lab.gateways)

    async def call_until(ended: asyncio.Event) -> None:
        while not ended.is_set():
            caller, model, begin_s = dice.choice(callers), dice.choice(MODELS), time.monotonic()
            stream = await send_stream(dice.choice(servers), caller.key, numbered_stream(dice, model))
            sent.append(Sent(caller=caller, model=model, stream=stream, begin_s=begin_s, end_s=time.monotonic()))

    async def move() -> float:
        ended = asyncio.Event()
        clients = [asyncio.create_task(call_until(ended)) for _ in range(NUM_CLIENTS)]
        for old, new in STEPS[1:]:
            await asyncio.sleep(STEP_S)
            weights = await asyncio.to_thread(lab.divide, old, new)
            steps.append(Step(weights=weights, begin_s=time.monotonic()))
        await asyncio.sleep(STEP_S)
        # Clients no longer call the new version's only server, which then stops. Its requests need another base.
        servers[:] = lab.gateways[:NUM_OLD]
        stopped_s = time.monotonic()
        await asyncio.to_thread(lab.stop, lab.new_server)
        await asyncio.sleep(STEP_S / 2)
        ended.set()
        await asyncio.gather(*clients)
        return stopped_s

    stopped_s = asyncio.run(move())
    lab.wait_settled()
    ran_on, truths = lab.ran_on(), lab.truths()
    cut = [one for one in sent if not one.stream.is_complete]
    total, wrong = 0, []
    for caller in callers:
        own = [one.stream for one in sent if one.caller is caller and one.stream.status == 200]
        total += lab.check_bills(caller.tenant_id, [(200, stream.answer) for stream in own])
        events = lab.events_of(caller.tenant_id)
        wrong += [stream for stream in own if not is_billed_as_received(stream, events)]
        wrong += [stream for stream in own if not truths[stream.request_id or ""].fits(events[stream.request_id or ""])]
    misplaced, pairs = [], {}
    shares = [Counter[str]() for _ in steps]
    for one in sent:
        if one.begin_s > stopped_s - LAG_S:
            continue
        possible = in_force(steps, one)
        bases = ran_on[one.stream.request_id or ""]
        if bases - {one.caller.drawn(step.weights, one.model) for step in possible}:
            misplaced.append(one)
        if len(possible) == 1:
            shares[steps.index(possible[0])].update(bases)
            if steps.index(possible[0]) == 1:
                pairs[one.caller.tenant_id, one.model] = bases
    on_new = [share[lab.new_id] / share.total() for share in shares]
    pairs_on_new = sum(bases == {lab.new_id} for bases in pairs.values()) / len(pairs)
    num_fallbacks = int(sum(lab.metric(gateway, "loramux_base_fallbacks_total") for gateway in lab.gateways[:NUM_OLD]))
    print(
        f"\nseed {SEED}: {len(sent)} streams, {dict(Counter(one.stream.status for one in sent))}, {len(cut)} cut, "
        f"{total} tokens in the ledger, {len(wrong)} wrong bills, {len(misplaced)} on another base than the drawn one; "
        f"{', '.join(f'{old}/{new}: {share:.0%}' for (old, new), share in zip(STEPS, on_new, strict=True))} "
        f"of the requests and, at 50/50, {pairs_on_new:.0%} of {len(pairs)} pairs on the new base; "
        f"{num_fallbacks} sequences on the old base after the new base's server had stopped"
    )
    assert cut == []
    assert wrong == []
    assert misplaced == []
    assert (on_new[0], on_new[2]) == (0, 1)
    assert abs(pairs_on_new - 0.5) < NUM_DEVIATIONS * 0.5 / math.sqrt(len(pairs))
    assert num_fallbacks > 0
