"""A long random run with real weights and kernels: every request gets the reference's tokens.

`tests/simulation/test_long_life.py` does the same on a simulated device, where every token is known exactly.
"""

from __future__ import annotations

import os
import random
from collections import Counter, defaultdict
from dataclasses import replace
from pathlib import Path

import pytest

from loramux.engine.architectures.model_config import ModelConfig
from loramux.engine.device.accelerator import HostAccelerator
from loramux.engine.device.backend import Backend
from loramux.engine.loop.config import pack_target
from loramux.engine.pages import state_checkpoints
from loramux.engine.parallel.sharded_adapters import AdapterDivider
from loramux.engine.parallel.sharding import worker_config
from loramux.engine.protocol.messages import (
    Abort,
    AdapterState,
    Add,
    Finished,
    Load,
    SamplingParams,
    StatsRequest,
    StepOutput,
    Unload,
)
from loramux.engine.sequences.activation import activation
from tests.conformance.mixture_families import MIXTURE_FAMILIES
from tests.conformance.parity import TOLERANCE, Subject, make_subject
from tests.conformance.tiny_models import PLANS, VOCAB_SIZE
from tests.engine.device.gpu_backend import plain_backend

NUM_EVENTS = int(os.environ.get("LORAMUX_LIFE_EVENTS", "10000"))
"""Number of events in the campaign: aborts, evictions, preemptions and reloads combined."""

GREEDY = SamplingParams(temperature=0.0, ignore_eos=True)
NAMES = [plan.name for plan in PLANS]
INVOCATION = (7, 8, 7)
ACTIVATED = ("r8", "r16", "r31")
"""The activated LoRAs, all with the same invocation."""
MAX_PROMPT = 150
MAX_OPEN = 16
"""Maximum number of requests that run or wait at the same time."""


FAMILIES = {
    "llama": NUM_EVENTS,
    "gemma3": NUM_EVENTS // 20,
    "qwen2-moe": NUM_EVENTS // 20,
    "gpt-oss": NUM_EVENTS // 20,
    "qwen3_5": NUM_EVENTS // 20,
}
"""Events of the campaign for each family. Layers have windows, experts, sinks or a state."""

WINDOW = 24


def make_life_subject(family: str, directory: Path) -> Subject:
    """peft cannot activate an adapter of experts."""
    can_activate = family not in MIXTURE_FAMILIES
    plans = [replace(p, invocation_tokens=INVOCATION) if can_activate and p.name in ACTIVATED else p for p in PLANS]
    return make_subject(family, directory, plans, window=WINDOW)


class Life:
    """Drives one engine with random events. The pool is too small for the load."""

    def __init__(self, subject: Subject, seed: int, backend: Backend | None = None, num_workers: int = 1) -> None:
        self.subject = subject
        self.rng = random.Random(seed)
        config = ModelConfig.load(subject.directory)
        own = worker_config(config, num_workers)
        geometry = own.geometry(4, 4)
        divider = AdapterDivider(pack_target(config, "float32"), pack_target(own, "float32"), ())
        largest = max(divider.num_pages(packed) for packed in subject.adapters.values())
        # Room for the largest adapter, and for the states of a few sequences, if they have any.
        num_pages = largest + 18 + 5 * config.num_state_pages(geometry)
        self.activated = [name for name in NAMES if subject.reference.peft_config[name].alora_invocation_tokens]
        self.assembled = subject.assemble(
            backend,
            pool_bytes=num_workers * num_pages * geometry.total_page_bytes,
            max_resident_adapters=3,
            max_sequences=8,
            tensor_parallel_size=num_workers,
            num_threads=max(num_workers, len(os.sched_getaffinity(0))),
        )
        # Set all bits, which is NaN, so that reads of unwritten memory are noticed.
        self.assembled.views.raw.fill_(0xFF)
        self.engine = self.assembled.engine
        self.prompts = [self._tokens(self.rng.randint(1, 90)) for _ in range(3)]
        self.asked: dict[str, tuple[str | None, Add]] = {}
        self.still_open: dict[str, None] = {}
        self.tokens: dict[str, list[int]] = defaultdict(list)
        self.ends: dict[str, Finished] = {}
        self.num_calls = 0
        self.num_answers = 0
        self.num_aborts = 0
        self.num_turns = 0
        self.loaded: set[str] = set()

    def events(self) -> Counter[str]:
        stats = self.engine.stats(StatsRequest(call_id=""))
        self.loaded |= {one.digest for one in stats.adapters}
        return Counter(
            aborts=self.num_aborts,
            evictions=stats.num_adapter_evictions,
            preemptions=stats.num_preemptions,
            reloads=max(0, stats.num_adapter_loads - len(self.loaded)),
        )

    def turn(self) -> None:
        rng = self.rng
        self.num_turns += 1
        if len(self.still_open) < MAX_OPEN and rng.random() < 0.5:
            self._ask(str(self.num_turns))
        if self.still_open and rng.random() < 0.1:
            self.engine.abort(b"", Abort(sequence_id=rng.choice(list(self.still_open))))
        if rng.random() < 0.02:
            digest, is_purge = self.subject.digests[rng.choice(NAMES)], rng.choice([False, True])
            call_id = f"unload {self.num_turns}"
            self.engine.unload(b"", Unload(call_id=call_id, digest=digest, is_purge=is_purge))
            self.num_calls += 1
        if rng.random() < 0.02:
            digest = self.subject.digests[rng.choice(NAMES)]
            self.engine.load(b"", Load(call_id=f"load {self.num_turns}", digest=digest))
            self.num_calls += 1
        if rng.random() < 0.1:
            self.prompts[rng.randrange(3)] = (*self.prompts[0], *self._tokens(20))[:MAX_PROMPT]
        for _ in range(rng.randint(1, 4)):
            self.engine.step()
        self._collect()

    def end(self) -> None:
        """Run all requests to completion, and check that nothing is left behind."""
        while self.engine.has_work:
            self.engine.step()
        self._collect()
        self.engine.check_integrity()
        assert set(self.ends) == set(self.asked)
        assert self.num_answers == self.num_calls

    def check(self) -> None:
        """Check that each token is the reference's choice after the previous tokens, apart from rounding."""
        for sequence_id, (name, add) in self.asked.items():
            tokens = self.tokens[sequence_id]
            if self.ends[sequence_id].reason == "length":
                assert len(tokens) == add.max_tokens
            if not tokens:
                continue
            num_prompt = len(add.prompt)
            expected = self.subject.reference_logits(name, [*add.prompt, *tokens], num_prompt)[num_prompt - 1 : -1]
            for token, logits in zip(tokens, expected, strict=True):
                assert logits.max() - logits[token] <= 2 * TOLERANCE * logits.abs().max(), sequence_id

    def _ask(self, sequence_id: str) -> None:
        rng = self.rng
        name = rng.choice([None, *NAMES])
        prompt, position = rng.choice(self.prompts), None
        if name in self.activated:
            # Half of these prompts continue an earlier one, and half contain the invocation.
            place = rng.choice([len(prompt), rng.randrange(len(prompt))])
            prompt = (*prompt[:place], *INVOCATION, *prompt[place:])
            position = activation(prompt, INVOCATION)
        add = Add(
            sequence_id=sequence_id,
            prompt=prompt,
            activation=position or 0,
            max_tokens=rng.randint(1, 60),
            sampling=GREEDY,
            digest=None if name is None else self.subject.digests[name],
            isolation_key=rng.choice([b"x", b"y"]),
            share_key=rng.choice("ab"),
        )
        self.asked[sequence_id] = (name, add)
        self.still_open[sequence_id] = None
        self.engine.add(b"", add)

    def _collect(self) -> None:
        for outbound in self.engine.take_outbox():
            match outbound.message:
                case StepOutput(outputs=outputs):
                    for output in outputs:
                        assert output.sequence_id not in self.ends, "tokens after the end"
                        self.tokens[output.sequence_id].extend(output.token_ids)
                case Finished() as finished:
                    assert finished.sequence_id not in self.ends, "ended twice"
                    was_unloaded = (finished.reason, finished.code) == ("error", "adapter_unloaded")
                    assert was_unloaded or finished.reason in ("length", "abort"), finished
                    self.num_aborts += finished.reason == "abort"
                    self.ends[finished.sequence_id] = finished
                    del self.still_open[finished.sequence_id]
                case AdapterState():
                    self.num_answers += 1

    def _tokens(self, count: int) -> tuple[int, ...]:
        return tuple(self.rng.randrange(2, VOCAB_SIZE) for _ in range(count))


@pytest.mark.parametrize(
    ("family", "num_events", "is_gpu"),
    [
        pytest.param("llama", 16, False, id="llama"),
        *(
            pytest.param(family, count, False, id=f"{family}-cpu-campaign", marks=pytest.mark.campaign)
            for family, count in FAMILIES.items()
        ),
        *(
            pytest.param(family, NUM_EVENTS // 20, True, id=f"{family}-gpu-campaign", marks=pytest.mark.campaign)
            for family in FAMILIES
        ),
    ],
)
def test_aborts_evictions_preemptions_and_reloads_change_no_answer(
    family: str, num_events: int, is_gpu: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the GPU's path, with reference kernels, steps are padded and submitted ahead."""
    # The prompts have only a few pages of a hybrid decoder.
    monkeypatch.setattr(state_checkpoints, "MIN_PAGES", 1)
    backend = plain_backend(HostAccelerator()) if is_gpu else None
    life = Life(make_life_subject(family, tmp_path), num_events, backend)
    while life.events().total() < num_events or min(life.events().values()) == 0:
        life.turn()
    life.end()
    life.check()
    print(f"{dict(life.events())} in {life.num_turns} turns and {len(life.asked)} requests")
    assert life.engine.stats(StatsRequest(call_id="")).cached_tokens > 0
    life.assembled.adapters.close()
