"""Measures how many steps per second the engine can run when the device takes no time.

The scheduler, pools, prefix cache and fair queue run as in a real engine, on a simulated device with a simulated clock
and a seeded random source. A fixed number of sequences runs at any time. Prompts have 16 to 100 tokens and answers have
32 to 128. The sequences belong to 8 accounts and use 24 adapters of 3 pages each, with 16 adapter slots. Steps per
second are computed from CPU time, including that of the simulated device. Every answer is compared with the answer that
the device should generate for its prompt.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections import defaultdict
from collections.abc import Sequence

from benchmarks.answers import CheckError
from benchmarks.harness import begin, new_parser, reports_failure
from loramux.engine.protocol.messages import Add, Finished, StepOutput
from tests.engine.simulated_engine import GREEDY, simulate_engine

VOCAB_SIZE = 97
GATEWAY = b"gateway"
ADAPTERS = {f"adapter{number}": 3 for number in range(24)}
CHUNK_STEPS = 200
TARGET_STEPS_S = 2000


class SteadyLoad:
    """An engine in which `num_running` sequences are always running and a few are waiting."""

    def __init__(self, num_running: int, is_ahead: bool) -> None:
        self._rng = random.Random(1)
        self._num_wanted = num_running + num_running // 8
        self._simulation = simulate_engine(
            num_pages=800,
            num_slots=16,
            adapters=ADAPTERS,
            max_batch_tokens=256,
            max_sequences=num_running,
            lookahead=is_ahead,
            vocab_size=VOCAB_SIZE,
            grammar_process=(),
        )
        self._engine, self._executor = self._simulation.engine, self._simulation.executor
        self._adds: dict[str, Add] = {}
        self._tokens: defaultdict[str, list[int]] = defaultdict(list)
        self._num_asked = 0
        self.num_checked = 0
        self.num_running = 0

    def run(self, num_steps: int) -> float:
        """Run `num_steps` steps. Return their CPU seconds, which exclude creating requests and checking answers."""
        seconds = 0.0
        for _ in range(num_steps):
            while len(self._adds) < self._num_wanted:
                self._ask()
            started_s = time.process_time()
            self._engine.step()
            outbox = self._engine.take_outbox()
            seconds += time.process_time() - started_s
            self.num_running += len(self._simulation.scheduler.running)
            for outbound in outbox:
                match outbound.message:
                    case StepOutput(outputs=outputs):
                        for output in outputs:
                            self._tokens[output.sequence_id].extend(output.token_ids)
                    case Finished() as finished:
                        self._check(finished)
            self._executor.batches.clear()
        return seconds

    def _ask(self) -> None:
        self._num_asked += 1
        add = Add(
            sequence_id=f"sequence{self._num_asked}",
            prompt=tuple(self._rng.randrange(VOCAB_SIZE) for _ in range(self._rng.randint(16, 100))),
            max_tokens=self._rng.randint(32, 128),
            sampling=GREEDY,
            digest=self._rng.choice(list(ADAPTERS)),
            share_key=f"share{self._rng.randrange(8)}",
            isolation_key=b"one",
        )
        self._adds[add.sequence_id] = add
        self._engine.add(GATEWAY, add)

    def _check(self, finished: Finished) -> None:
        add = self._adds.pop(finished.sequence_id)
        received = self._tokens.pop(finished.sequence_id)
        if received != self._executor.generate(add.prompt, add.max_tokens, add.digest):
            raise CheckError(f"{finished.sequence_id} received tokens that the device did not generate")
        self.num_checked += 1


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = new_parser("simulation", __doc__)
    parser.add_argument("--running", type=int, default=32, help="sequences running at any time")
    parser.add_argument(
        "--steps", type=int, default=10_000, help="steps in each mode, rounded down to a multiple of 200"
    )
    return parser.parse_args(argv)


@reports_failure
def main(argv: Sequence[str] | None = None) -> None:
    run = begin(parse(argv))
    arguments = run.arguments
    results = {}
    for name, is_ahead in (("at once", False), ("one step ahead", True)):
        load = SteadyLoad(arguments.running, is_ahead)
        load.run(CHUNK_STEPS)
        load.num_running = 0
        num_chunks = max(1, arguments.steps // CHUNK_STEPS)
        rates = [CHUNK_STEPS / load.run(CHUNK_STEPS) for _ in range(num_chunks)]
        if not load.num_checked:
            raise CheckError("no sequence finished: use more --steps")
        results[name] = {
            "steps": num_chunks * CHUNK_STEPS,
            "steps_per_s_median": round(statistics.median(rates)),
            "steps_per_s_best": round(max(rates)),
            "running_on_average": round(load.num_running / (num_chunks * CHUNK_STEPS), 1),
            "answers_checked": load.num_checked,
        }
        run.console.print(f"{name}: {results[name]}")
    run.write({"target_steps_per_s": TARGET_STEPS_S, "results": results})


if __name__ == "__main__":
    raise SystemExit(main())
