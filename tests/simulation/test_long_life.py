"""Long random runs on the simulated device. Whatever happens to requests, nothing is lost or leaked."""

from __future__ import annotations

import os
import random

import msgspec
import pytest

from loramux.engine.protocol.messages import (
    Abort,
    AdapterState,
    Add,
    Extend,
    Finished,
    ForgetPrefixes,
    Load,
    PromptLogprob,
    SamplingParams,
    StepOutput,
    Unload,
)
from loramux.engine.sequences.cache_groups import CacheLayout, cache_layout, hybrid_layout
from tests.engine.simulated_engine import GREEDY, VOCAB_SIZE, Simulation, simulate_engine, stats_of
from tests.reliability.record import recorded

NUM_TURNS = int(os.environ.get("LORAMUX_SIMULATION_TURNS", "10000"))
"""Number of turns in each campaign run."""


MAX_LEN = 300
LAYOUTS: dict[str, CacheLayout] = {
    "whole": cache_layout((None,), MAX_LEN),
    "sliding": cache_layout((20, 20), MAX_LEN),
    "mixed": cache_layout((20, 20, None, 20, 20, None), MAX_LEN),
    **{f"state of {count}": hybrid_layout(3, (1, 2), count) for count in range(1, 5)},
}
"""Layers with and without windows, and layers with a state of one to four pages for each sequence. Pages hold K and V
of only 16 tokens, so that many prompts leave checkpoints.
"""

SETTINGS = (
    *[GREEDY] * 4,
    SamplingParams(temperature=0.0, ignore_eos=True, num_logprobs=2),
    SamplingParams(temperature=0.0, ignore_eos=True, logit_bias=((7, 0.5),)),
    SamplingParams(temperature=0.0, ignore_eos=True, num_prompt_logprobs=1),
)
"""Settings that always choose the most likely token, which the simulated model prefers by 1."""


class Life:
    """Drives one engine with random events and checks every token that it generates."""

    def __init__(
        self,
        seed: int,
        lookahead: bool,
        layers: str = "whole",
        speculates: bool = False,
        has_head: bool = False,
        num_host_pages: int = 0,
        num_disk_pages: int = 0,
    ) -> None:
        self.rng = random.Random(seed)
        self.speculates = speculates
        self.has_tier = num_host_pages > 0
        self.has_disk = num_disk_pages > 0
        # Only a step without waiting sequences has drafts.
        self.ask_rate = 0.08 if speculates or has_head else 0.45
        self.names = {f"adapter{i}": self.rng.randint(1, 6) for i in range(14)}
        self.vocab_sizes = {"adapter0": VOCAB_SIZE + 5, "adapter1": VOCAB_SIZE + 90, "adapter2": 50}
        self.simulation: Simulation = simulate_engine(
            num_pages=self.rng.choice([24, 40, 80]),
            num_slots=self.rng.choice([1, 3, 6]),
            adapters=self.names,
            max_sequences=self.rng.choice([3, 8]),
            max_batch_tokens=self.rng.choice([16, 64]),
            max_model_len=MAX_LEN,
            lookahead=lookahead,
            max_waiting_tokens=4000,
            max_waiting_s=500.0,
            cache=LAYOUTS[layers],
            vocab_sizes=self.vocab_sizes,
            speculates=speculates,
            has_head=has_head,
            num_host_pages=num_host_pages,
            num_disk_pages=num_disk_pages,
            disk_chance=random.Random(seed),
        )
        # Copying takes no time, until an event says otherwise.
        self.simulation.prefixes.host.note_computed(1, 1.0)
        has_states = LAYOUTS[layers].num_state_pages > 0
        # Few long prompts and adapters, so that many requests find a checkpoint.
        self.digests = ["adapter3", "adapter4", "adapter5"] if has_states else [*self.names, "missing"]
        self.prompts = [self._tokens(self.rng.randint(1, 150 if has_states else 80)) for _ in range(5)]
        self.adds: dict[str, Add] = {}
        self.extended: dict[str, int] = {}
        self.finished: dict[str, Finished] = {}
        self.tokens: dict[str, list[int]] = {}
        self.scores: dict[str, list[PromptLogprob]] = {}
        self.num_answers = 0
        self.num_calls = 0
        self.num_forgotten = 0
        self.num_steps = 0

    def turn(self, number: int) -> None:
        rng, engine = self.rng, self.simulation.engine
        self.simulation.clock.now += rng.random()
        if rng.random() < self.ask_rate:
            self._ask(f"s{number}")
        if self.adds and rng.random() < 0.08:
            engine.abort(b"gateway", Abort(sequence_id=rng.choice(list(self.adds))))
        if rng.random() < 0.03:
            digest, is_purge = rng.choice(list(self.names)), rng.choice([False, True])
            engine.unload(b"gateway", Unload(call_id=f"u{number}", digest=digest, is_purge=is_purge))
            self.num_calls += 1
        if rng.random() < 0.03:
            engine.load(b"gateway", Load(call_id=f"l{number}", digest=rng.choice([*self.names, "missing"])))
            self.num_calls += 1
        if self.extended and rng.random() < 0.3:
            self._extend(rng.choice(list(self.extended)))
        if rng.random() < 0.02:
            broken = self.simulation.executor.not_finite_for
            broken.clear() if broken else broken.add(rng.choice(list(self.names)))
        if rng.random() < 0.05:
            self.simulation.hold_loads()
        elif rng.random() < 0.2:
            self.simulation.let_loads_go()
        if self.has_tier and rng.random() < 0.02:
            self.simulation.host_memory.load_s = rng.choice([0.0, 0.0, 1e9])
        if self.has_disk and rng.random() < 0.05:
            self.simulation.disk.is_holding = rng.random() < 0.3
        # Rarely enough for the tier to become full in between.
        if self.has_tier and rng.random() < self.ask_rate / 40:
            self._forget_prefixes(f"f{number}")
        self._step()

    def end(self) -> None:
        simulation = self.simulation
        simulation.let_loads_go()
        simulation.executor.not_finite_for.clear()
        simulation.disk.is_holding = False
        for _ in range(20_000):
            if not simulation.engine.has_work:
                break
            # Advance the clock, so that pauses end too.
            simulation.clock.now += 1.0
            self._step()
        else:
            raise AssertionError("the engine still has work")
        simulation.engine.check_integrity()
        host = simulation.prefixes.host
        while simulation.disk.num_queued:
            host.poll()
        host.check_integrity()
        # Slots whose pages were deleted are erased.
        assert set(simulation.disk.contents()) == {page.key for page in host.disk._index}

    def check(self) -> None:
        assert set(self.finished) == set(self.adds)
        assert self.num_answers == self.num_calls
        generate = self.simulation.executor.generate
        for name, add in self.adds.items():
            finished, received = self.finished[name], self.tokens.get(name, [])
            limit = self.extended.get(name, add.max_tokens)
            expected = generate(add.prompt, limit, add.digest, add.activation, add.vocab_size)
            assert received == expected[: len(received)]
            assert finished.cached_tokens <= finished.prompt_tokens in (0, len(add.prompt))
            scored = [score.token_id for score in self.scores.get(name, [])]
            assert scored == list(add.prompt[1 : len(scored) + 1])
            if received and add.sampling.num_prompt_logprobs is not None:
                assert len(scored) == len(add.prompt) - 1
            assert finished.completion_tokens <= len(received)
            if finished.reason == "length":
                # A request's limit can be raised only while its adapter is resident and the pool has room.
                assert add.max_tokens <= finished.completion_tokens == len(received) <= limit
                assert name in self.extended or finished.completion_tokens == limit

    def _ask(self, name: str) -> None:
        rng = self.rng
        if self.has_tier and self.tokens and rng.random() < 0.3:
            self._continue(name)
            return
        prompt = rng.choice(self.prompts)
        if rng.random() < 0.3:
            self.prompts[rng.randrange(5)] = (*prompt, *self._tokens(rng.randint(1, 30)))[:200]
        digest = rng.choice([None, None, *self.digests])
        vocab_size = None if digest is None else self.vocab_sizes.get(digest)
        activation = 0 if digest is None or vocab_size is not None else rng.choice([0, rng.randrange(len(prompt))])
        if vocab_size is not None:
            # Use tokens beyond the base's vocabulary, or drop tokens beyond the adapter's smaller vocabulary.
            prompt = tuple(token % vocab_size for token in (*prompt, vocab_size - 1))
            if rng.random() < 0.05:
                vocab_size += 1
        max_tokens = rng.randint(1, 60)
        add = self.simulation.make_add(
            name,
            prompt,
            max_tokens,
            digest,
            rng.choice(SETTINGS),
            activation=activation,
            vocab_size=vocab_size,
            share_key=rng.choice("abc"),
            weight=rng.choice([1, 3]),
            priority=rng.choice([0, 0, 0, 1]),
            isolation_key=rng.choice([b"", b"x", b"y"]),
            pause_s=rng.choice([0.0, 0.0, 10.0]),
            tokens_at_once=rng.choice([1, 1, 3, 16]),
            prediction=self._prediction(prompt, max_tokens + 20, digest, activation, vocab_size),
            is_background=self.has_tier and rng.random() < 0.3,
        )
        self._send(add)

    def _continue(self, name: str) -> None:
        """Extend the prompt of a request, which may still run, by its answer so far and more tokens."""
        rng = self.rng
        before = self.adds[rng.choice(list(self.tokens)[-20:])]
        prompt = (*before.prompt, *self.tokens[before.sequence_id], *self._tokens(rng.randint(1, 20)))[:200]
        if before.vocab_size is not None:
            prompt = tuple(token % before.vocab_size for token in prompt)
        max_tokens = rng.randint(1, 60)
        add = msgspec.structs.replace(
            before,
            sequence_id=name,
            prompt=prompt,
            max_tokens=max_tokens,
            prediction=self._prediction(prompt, max_tokens + 20, before.digest, before.activation, before.vocab_size),
            is_background=rng.random() < 0.3,
        )
        self._send(add)

    def _send(self, add: Add) -> None:
        self.adds[add.sequence_id] = add
        if add.pause_s:
            self.extended[add.sequence_id] = add.max_tokens
        self.simulation.engine.add(b"gateway", add)

    def _forget_prefixes(self, call_id: str) -> None:
        """Delete the pages of an isolation key, whose requests may still run."""
        key, prefixes = self.rng.choice([b"x", b"y"]), self.simulation.prefixes
        self.simulation.engine.forget_prefixes(b"gateway", ForgetPrefixes(call_id=call_id, isolation_keys=(key,)))
        self.num_calls += 1
        self.num_forgotten += 1
        assert key not in {page.owner for page in prefixes._by_key.values()}
        assert key not in prefixes.host.owners()

    def _prediction(
        self, prompt: tuple[int, ...], num_tokens: int, digest: str | None, activation: int, vocab_size: int | None
    ) -> tuple[int, ...]:
        """The answer, with some tokens changed, left out or added."""
        if not self.speculates or self.rng.random() < 0.1:
            return ()
        predicted: list[int] = []
        for token in self.simulation.executor.generate(prompt, num_tokens, digest, activation, vocab_size):
            predicted += self.rng.choices(([token], [], [token, token], [0]), (20, 1, 1, 1))[0]
        return tuple(predicted)

    def _extend(self, name: str) -> None:
        if name in self.finished:
            return
        add = self.adds[name]
        limit = min(self.extended[name] + self.rng.randint(1, 30), MAX_LEN - len(add.prompt))
        self.extended[name] = max(self.extended[name], limit)
        self.simulation.engine.extend(b"gateway", Extend(sequence_id=name, max_tokens=limit))

    def _step(self) -> None:
        self.simulation.engine.step()
        self.num_steps += 1
        for outbound in self.simulation.engine.take_outbox():
            match outbound.message:
                case StepOutput(outputs=outputs):
                    for output in outputs:
                        assert output.sequence_id not in self.finished, "tokens after the end"
                        self.tokens.setdefault(output.sequence_id, []).extend(output.token_ids)
                        self.scores.setdefault(output.sequence_id, []).extend(output.prompt_logprobs)
                case Finished() as finished:
                    assert finished.sequence_id not in self.finished, "ended twice"
                    self.finished[finished.sequence_id] = finished
                case AdapterState():
                    self.num_answers += 1
        self.simulation.pages.check_integrity()
        # No later step may read a page that is free now.
        self.simulation.executor.forget(self.simulation.pages._free)
        self.simulation.prefixes.host.check_integrity()
        self.simulation.host_memory.forget(self.simulation.prefixes.host.free_slots)

    def _tokens(self, count: int) -> tuple[int, ...]:
        return tuple(self.rng.randrange(1000) for _ in range(count))


def live(
    seed: int,
    lookahead: bool,
    num_turns: int,
    layers: str = "whole",
    speculates: bool = False,
    has_head: bool = False,
    num_host_pages: int = 0,
    num_disk_pages: int = 0,
) -> Life:
    life = Life(seed, lookahead, layers, speculates, has_head, num_host_pages, num_disk_pages)
    with recorded("simulation") as figures:
        for number in range(num_turns):
            life.turn(number)
            figures["steps"] = life.num_steps
        life.end()
        life.check()
        figures["steps"] = life.num_steps
    return life


@pytest.mark.parametrize("seed", range(4))
def test_random_events_lose_and_leak_nothing(seed: int) -> None:
    life = live(seed, bool(seed % 2), 400)
    codes = {finished.code for finished in life.finished.values()}
    assert {None, "adapter_unavailable"} <= codes
    assert stats_of(life.simulation).cached_tokens > 0


@pytest.mark.parametrize("lookahead", [False, True], ids=["at once", "lookahead"])
@pytest.mark.parametrize("layers", ["sliding", "mixed"])
def test_windowed_layers_lose_and_leak_nothing(layers: str, lookahead: bool) -> None:
    life = live(3, lookahead, 300, layers)
    assert stats_of(life.simulation).cached_tokens > 0


@pytest.mark.campaign
@pytest.mark.parametrize("lookahead", [False, True], ids=["at once", "lookahead"])
@pytest.mark.parametrize("layers", ["sliding", "mixed"])
@pytest.mark.parametrize("seed", range(200, 205))
def test_long_runs_of_windowed_layers_lose_and_leak_nothing(seed: int, layers: str, lookahead: bool) -> None:
    life = live(seed, lookahead, NUM_TURNS, layers)
    # In the smallest pool, freed pages of windowed layers are evicted before another request needs them.
    assert stats_of(life.simulation).cached_tokens > 0 or life.simulation.pages.num_pages == 24


@pytest.mark.campaign
@pytest.mark.parametrize("seed", range(100, 110))
def test_long_random_runs_lose_and_leak_nothing(seed: int) -> None:
    """Run NUM_TURNS turns for each of ten seeds."""
    life = live(seed, bool(seed % 2), NUM_TURNS)
    counts = stats_of(life.simulation)
    # A pool of 80 pages has room for every request, so it needs no preemption.
    assert counts.num_preemptions > 0 or life.simulation.pages.num_pages == 80
    assert counts.num_adapter_evictions > 0


@pytest.mark.parametrize("lookahead", [False, True], ids=["at once", "lookahead"])
def test_sequences_with_a_state_lose_and_leak_nothing(lookahead: bool) -> None:
    counts = stats_of(live(0, lookahead, 300, "state of 3").simulation)
    assert counts.num_preemptions > 0
    assert counts.cached_tokens > 0


def check_drafts(life: Life) -> None:
    """Check that drafts were accepted and rejected, and that the numbers of the bills add up to those of the engine."""
    drafts, ends = stats_of(life.simulation).drafts, life.finished.values()
    assert 0 < drafts.accepted_prediction_tokens < drafts.prediction_tokens
    accepted = sum(one.accepted_prediction_tokens for one in ends)
    assert accepted == drafts.accepted_prediction_tokens
    assert accepted + sum(one.rejected_prediction_tokens for one in ends) == drafts.prediction_tokens


@pytest.mark.parametrize("lookahead", [False, True], ids=["at once", "lookahead"])
@pytest.mark.parametrize("layers", ["whole", "mixed", "state of 2"])
def test_drafts_lose_and_leak_nothing(layers: str, lookahead: bool) -> None:
    check_drafts(live(5, lookahead, 400, layers, speculates=True))


@pytest.mark.parametrize("lookahead", [False, True], ids=["at once", "lookahead"])
def test_drafts_of_the_head_lose_and_leak_nothing(lookahead: bool) -> None:
    drafts = stats_of(live(7, lookahead, 300, has_head=True).simulation).drafts
    assert 0 < drafts.accepted_head_tokens < drafts.head_tokens


@pytest.mark.campaign
@pytest.mark.parametrize("layers", ["whole", "sliding", "mixed", "state of 1", "state of 3"])
@pytest.mark.parametrize("seed", range(400, 404))
def test_long_runs_with_drafts_lose_and_leak_nothing(seed: int, layers: str) -> None:
    check_drafts(live(seed, bool(seed % 2), NUM_TURNS, layers, speculates=True))


@pytest.mark.campaign
@pytest.mark.parametrize("seed", range(500, 504))
def test_long_runs_with_drafts_of_the_head_lose_and_leak_nothing(seed: int) -> None:
    drafts = stats_of(live(seed, bool(seed % 2), NUM_TURNS, has_head=True).simulation).drafts
    assert 0 < drafts.accepted_head_tokens < drafts.head_tokens


@pytest.mark.campaign
@pytest.mark.parametrize("seed", range(300, 306))
def test_long_runs_of_sequences_with_a_state_lose_and_leak_nothing(seed: int) -> None:
    life = live(seed, bool(seed % 2), NUM_TURNS, f"state of {1 + seed % 4}")
    counts = stats_of(life.simulation)
    # In the smallest pool, checkpoints are evicted before another request needs them.
    assert counts.cached_tokens > 0 or life.simulation.pages.num_pages == 24
    assert counts.num_adapter_evictions > 0


def check_host_pages(life: Life) -> None:
    """Check that copies were restored, replaced and declined."""
    counts = stats_of(life.simulation).host_pages
    assert min(counts.num_saved, counts.num_loaded, counts.num_evictions, counts.restored_tokens) > 0
    assert counts.recomputed_tokens > 0


@pytest.mark.parametrize("lookahead", [False, True], ids=["at once", "lookahead"])
@pytest.mark.parametrize("layers", ["whole", "mixed", "state of 2"])
def test_pages_in_host_memory_lose_and_leak_nothing(layers: str, lookahead: bool) -> None:
    life = live(5, lookahead, 250, layers, num_host_pages=30)
    assert life.num_forgotten > 0
    assert stats_of(life.simulation).host_pages.restored_tokens > 0


def check_disk_pages(life: Life) -> None:
    """Check that pages were written, read and lost, and that transfers failed."""
    counts = stats_of(life.simulation).disk_pages
    assert min(counts.num_written, counts.num_read, counts.num_lost, counts.num_failed) > 0


@pytest.mark.parametrize(("layers", "lookahead"), [("whole", False), ("mixed", True), ("state of 2", True)])
def test_pages_on_disk_lose_and_leak_nothing(layers: str, lookahead: bool) -> None:
    life = live(5, lookahead, 200, layers, num_host_pages=24, num_disk_pages=60)
    counts = stats_of(life.simulation).disk_pages
    assert min(counts.num_written, counts.num_read) > 0


@pytest.mark.campaign
@pytest.mark.parametrize("layers", ["whole", "sliding", "mixed", "state of 2"])
@pytest.mark.parametrize("seed", range(510, 514))
def test_long_runs_with_drafts_and_pages_on_disk_lose_and_leak_nothing(seed: int, layers: str) -> None:
    num_disk_pages = [40, 160][seed // 2 % 2]
    life = live(
        seed, bool(seed % 2), NUM_TURNS, layers, speculates=True, num_host_pages=30, num_disk_pages=num_disk_pages
    )
    if layers == "state of 2":
        # Few steps there have no waiting sequence, and few prompts leave checkpoints that are evicted and needed again.
        assert stats_of(life.simulation).drafts.accepted_prediction_tokens > 0
    else:
        check_drafts(life)
        check_host_pages(life)
        check_disk_pages(life)


@pytest.mark.campaign
@pytest.mark.parametrize("layers", ["whole", "sliding", "mixed", "state of 2"])
@pytest.mark.parametrize("seed", range(500, 504))
def test_long_runs_with_pages_in_host_memory_lose_and_leak_nothing(seed: int, layers: str) -> None:
    life = live(seed, bool(seed % 2), NUM_TURNS, layers, speculates=seed > 501, num_host_pages=[10, 60][seed // 2 % 2])
    check_host_pages(life)
