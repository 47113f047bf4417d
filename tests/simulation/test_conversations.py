"""Long conversations of many tenants on the simulated device. Their prefixes move between the pool and host memory."""

from __future__ import annotations

import random

import pytest

from loramux.engine.protocol.messages import Add, Finished, ForgetPrefixes, StepOutput
from loramux.engine.sequences.cache_groups import CacheLayout, cache_layout, hybrid_layout
from tests.engine.simulated_engine import Simulation, simulate_engine, stats_of

NUM_TENANTS = 200
NUM_TURNS = 4
MAX_CONTEXT = 8192
LAYOUTS: dict[str, CacheLayout] = {
    "whole": cache_layout((None,), MAX_CONTEXT),
    "state of 2": hybrid_layout(3, (1, 2), 2),
}


class Conversations:
    """Each tenant asks once per turn and continues its own context, half of them with an adapter that all share."""

    def __init__(self, seed: int, layers: str, lookahead: bool) -> None:
        self.rng = random.Random(seed)
        self.simulation: Simulation = simulate_engine(
            num_pages=2500,
            num_host_pages=45_000,
            adapters={"adapter": 3},
            max_sequences=16,
            max_batch_tokens=2048,
            max_model_len=MAX_CONTEXT,
            lookahead=lookahead,
            cache=LAYOUTS[layers],
            max_waiting_tokens=1 << 30,
        )
        self.contexts: list[tuple[int, ...]] = [()] * NUM_TENANTS
        self.forgotten: set[int] = set()
        self.cached_tokens = 0

    def turn(self, number: int) -> None:
        """Run one request of each tenant, and delete the prefixes of some tenants before."""
        rng, simulation = self.rng, self.simulation
        self.forgotten = set(rng.sample(range(NUM_TENANTS), 10))
        forget = ForgetPrefixes(call_id=str(number), isolation_keys=tuple(map(_key, self.forgotten)))
        simulation.engine.forget_prefixes(b"gateway", forget)
        adds = [self._add(number, tenant) for tenant in rng.sample(range(NUM_TENANTS), NUM_TENANTS)]
        for add in adds:
            simulation.engine.add(b"gateway", add)
        while simulation.engine.has_work:
            self._step()
        for add in adds:
            self._check(add, number)
        simulation.executor.batches.clear()

    def _add(self, number: int, tenant: int) -> Add:
        rng = self.rng
        # The first messages of all tenants begin alike.
        start = tuple(range(600)) if number == 0 else ()
        message = tuple(rng.randrange(1000) for _ in range(rng.choice([30, 1300, 1900])))
        num_answer = rng.randint(2, 90)
        prompt = (*self.contexts[tenant], *start, *message)[: MAX_CONTEXT - num_answer]
        return self.simulation.make_add(
            f"{number} {tenant}",
            prompt,
            num_answer,
            "adapter" if tenant % 2 else None,
            isolation_key=_key(tenant),
            share_key=str(tenant),
            is_background=tenant % 5 == 0,
        )

    def _step(self) -> None:
        simulation = self.simulation
        simulation.engine.step()
        for outbound in simulation.engine.take_outbox():
            match outbound.message:
                case StepOutput(outputs=outputs):
                    for output in outputs:
                        simulation.tokens[output.sequence_id].extend(output.token_ids)
                case Finished() as finished:
                    simulation.finished[finished.sequence_id] = finished
        # No later step may read a page or a slot that is free now.
        simulation.executor.forget(simulation.pages._free)
        simulation.host_memory.forget(simulation.prefixes.host.free_slots)

    def _check(self, add: Add, number: int) -> None:
        finished, received = self.simulation.finished[add.sequence_id], self.simulation.tokens[add.sequence_id]
        assert finished.reason == "length"
        assert received == self.simulation.expected(add)
        tenant = int(add.isolation_key)
        # The first turn finds nothing, because no tenant finds another's prefix, and the deleted ones nothing either.
        assert finished.cached_tokens <= (0 if tenant in self.forgotten else len(self.contexts[tenant]))
        self.cached_tokens += finished.cached_tokens
        self.contexts[tenant] = (*add.prompt, *received)


def _key(tenant: int) -> bytes:
    return b"%d" % tenant


@pytest.mark.campaign
@pytest.mark.parametrize("lookahead", [False, True], ids=["at once", "lookahead"])
@pytest.mark.parametrize("layers", list(LAYOUTS))
def test_long_conversations_of_many_tenants(layers: str, lookahead: bool) -> None:
    conversations = Conversations(3, layers, lookahead)
    for number in range(NUM_TURNS):
        conversations.turn(number)
    simulation = conversations.simulation
    simulation.engine.check_integrity()
    simulation.prefixes.host.check_integrity()
    counts = stats_of(simulation)
    assert max(map(len, conversations.contexts)) > 0.9 * MAX_CONTEXT
    assert counts.num_preemptions > 0
    assert counts.host_pages.restored_tokens > 0.5 * conversations.cached_tokens > 0
    assert counts.host_pages.num_evictions > 0
