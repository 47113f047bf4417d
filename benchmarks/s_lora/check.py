"""Checks that an adapter's answers do not change while other adapters are loaded and evicted.

The check runs before any measurement. A few (adapter, prompt) pairs are answered in float32, each alone, on an engine
with room for all adapters. Then an engine with a small pool answers them among many other requests, once at the front
of the queue and once at its end. In between, the pairs' adapters are evicted and reloaded into other pages.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import msgspec

from benchmarks.answers import Answer, CheckError, compare
from benchmarks.running_engine import RunningEngine
from benchmarks.s_lora.engine import PoolPlan
from benchmarks.s_lora.traffic import Traffic
from benchmarks.s_lora.workload import Lengths
from loramux.engine.protocol.messages import Add, SamplingParams

NUM_PAIRS = 6
POOL_ADAPTERS = 4
NUM_ADAPTERS = 12
NUM_OTHERS = 36
NUM_SEQUENCES = 8
PROMPTS, OUTPUTS = Lengths(8, 64), Lengths(8, 24)


@dataclass(frozen=True, slots=True)
class Checked:
    """Result of the check: `num_tokens` float32 tokens were compared, and `worst` is the largest difference between an
    expected and an actual log-probability."""

    num_tokens: int
    worst: float
    num_evictions: int
    num_preemptions: int


def small_plan() -> PoolPlan:
    return PoolPlan(POOL_ADAPTERS, NUM_SEQUENCES, POOL_ADAPTERS, PROMPTS, OUTPUTS)


def roomy_plan() -> PoolPlan:
    return replace(small_plan(), num_adapters=NUM_ADAPTERS)


def pairs_of(traffic: Traffic, digests: Sequence[str]) -> list[Add]:
    """(adapter, prompt) pairs. Pairs 2n and 2n + 1 share a prompt, to check that their adapters give different
    answers."""
    adds = _requests(traffic, NUM_PAIRS, digests, seed=7)
    return [
        msgspec.structs.replace(
            add,
            sequence_id=f"pair {number}",
            prompt=adds[number // 2 * 2].prompt,
            max_tokens=OUTPUTS.end,
            digest=digests[number],
            isolation_key=digests[number].encode(),
        )
        for number, add in enumerate(adds)
    ]


def answer_alone(engine: RunningEngine, pairs: Sequence[Add]) -> dict[str, Answer]:
    """Answer each pair alone. Raises CheckError if an adapter does not change the base's answer, or if two adapters
    give the same answer to a prompt.
    """
    answers: dict[str, Answer] = {}
    for pair in pairs:
        answers |= engine.answer([pair])
        plain = msgspec.structs.replace(pair, digest=None, isolation_key=b"base")
        if engine.answer([plain])[pair.sequence_id].tokens == answers[pair.sequence_id].tokens:
            raise CheckError(f"the adapter of {pair.sequence_id} does not change the base's answer")
    for even, odd in zip(pairs[::2], pairs[1::2], strict=True):
        if answers[even.sequence_id].tokens == answers[odd.sequence_id].tokens:
            raise CheckError(f"the adapters of {even.sequence_id} and {odd.sequence_id} give the same answer")
    return answers


def check_mixed(
    engine: RunningEngine, traffic: Traffic, digests: Sequence[str], pairs: Sequence[Add], expected: dict[str, Answer]
) -> Checked:
    """Answer the pairs among other requests while adapters are evicted. Raises CheckError if an answer differs or no
    adapter was evicted.
    """
    others = _requests(traffic, NUM_OTHERS, digests, seed=8)
    again = {pair.sequence_id: f"{pair.sequence_id}, again" for pair in pairs}
    # Use a separate namespace of the prefix cache, so that the second answer is computed.
    repeated = [
        msgspec.structs.replace(pair, sequence_id=again[pair.sequence_id], isolation_key=b"again " + pair.isolation_key)
        for pair in pairs
    ]
    found = engine.answer([*pairs, *others, *repeated])
    wanted = expected | {again[name]: answer for name, answer in expected.items()}
    worst, num_tokens = compare({name: found[name] for name in wanted}, wanted)
    stats = engine.stats()
    if not stats.num_adapter_evictions:
        raise CheckError("no adapter was evicted, so the check proves nothing")
    return Checked(num_tokens, worst, stats.num_adapter_evictions, stats.num_preemptions)


def _requests(traffic: Traffic, count: int, digests: Sequence[str], seed: int) -> list[Add]:
    """Requests for uniformly drawn adapters, with log-probabilities for comparing nearly tied tokens."""
    sampling = SamplingParams(temperature=0.0, ignore_eos=True, num_logprobs=2)
    traffic = replace(traffic, prompts=PROMPTS, outputs=OUTPUTS, alpha=1.0, num_prefix=0)
    return traffic.requests(count, digests[:NUM_ADAPTERS], sampling, seed)
