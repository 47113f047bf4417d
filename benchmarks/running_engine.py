"""A complete engine in this process, which a benchmark steps itself."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from benchmarks.answers import Answer, CheckError
from loramux.engine.adapters.stager import Stager
from loramux.engine.decoder.weights import WeightSource
from loramux.engine.device.backend import Backend
from loramux.engine.loop.assembly import AssembledEngine, assemble_engine
from loramux.engine.loop.config import EngineConfig
from loramux.engine.loop.engine import Outbound
from loramux.engine.protocol.messages import (
    AdapterState,
    Add,
    Finished,
    FromEngine,
    Load,
    SamplingParams,
    Stats,
    StatsRequest,
    StepOutput,
    Unload,
)

WAKE_S = 0.001
GREEDY = SamplingParams(temperature=0.0, ignore_eos=True)


@dataclass(frozen=True, slots=True, eq=False)
class RunningEngine:
    assembled: AssembledEngine
    wake: threading.Event

    @property
    def num_sequences(self) -> int:
        return self.assembled.engine.num_sequences

    def add(self, request: Add) -> None:
        self.assembled.engine.add(b"", request)

    def stats(self) -> Stats:
        return self.assembled.engine.stats(StatsRequest(call_id=""))

    def is_resident(self, digest: str | None) -> bool:
        return any(one.digest == digest for one in self.stats().adapters)

    def step(self, wait_s: float = WAKE_S) -> list[Outbound]:
        """Run one step, or wait at most `wait_s` if nothing can run, and return the engine's messages."""
        if not self.assembled.engine.step():
            self.wake.wait(wait_s)
            self.wake.clear()
        return self.assembled.engine.take_outbox()

    def finish(self) -> list[FromEngine]:
        """Run steps until no work is left, and return the engine's messages."""
        said: list[Outbound] = []
        while self.assembled.engine.has_work:
            said += self.step()
        return [outbound.message for outbound in (*said, *self.assembled.engine.take_outbox())]

    def load(self, digests: Iterable[str]) -> None:
        """Load adapters. Raises CheckError if one cannot be loaded."""
        for digest in digests:
            self.assembled.engine.load(b"", Load(call_id=digest, digest=digest))
        for message in self.finish():
            if isinstance(message, AdapterState) and message.state != "resident":
                raise CheckError(f"adapter {message.digest} is {message.state}: {message.message}")

    def unload(self, digests: Iterable[str]) -> None:
        for digest in digests:
            self.assembled.engine.unload(b"", Unload(call_id=digest, digest=digest))
        self.finish()

    def abort(self) -> None:
        self.assembled.engine.abort_all()
        self.finish()

    def prefill(self, requests: Sequence[Add]) -> None:
        """Add requests, and run steps until each has its first token."""
        for request in requests:
            self.add(request)
        waiting = {request.sequence_id for request in requests}
        while waiting:
            for outbound in self.step():
                if isinstance(outbound.message, StepOutput):
                    waiting -= {output.sequence_id for output in outbound.message.outputs}

    def answer(self, requests: Iterable[Add]) -> dict[str, Answer]:
        """Run requests to completion. Raises CheckError if one ends for any reason other than reaching its length."""
        answers = {}
        for request in requests:
            answers[request.sequence_id] = Answer([], [])
            self.add(request)
        for message in self.finish():
            if isinstance(message, StepOutput):
                for output in message.outputs:
                    answers[output.sequence_id].tokens.extend(output.token_ids)
                    answers[output.sequence_id].logprobs.extend(output.logprobs)
            elif isinstance(message, Finished) and message.reason != "length":
                raise CheckError(f"request {message.sequence_id} ended with {message.reason}: {message.message}")
        return answers


def greedy_adds(
    prompts: Iterable[Sequence[int]],
    num_tokens: int,
    digests: Sequence[str] | None = None,
    sampling: SamplingParams = GREEDY,
) -> list[Add]:
    """One request per prompt, named after its number, for the base or for the adapters in turn."""
    return [
        Add(
            sequence_id=str(row),
            prompt=tuple(prompt),
            max_tokens=num_tokens,
            sampling=sampling,
            digest=digests[row % len(digests)] if digests else None,
        )
        for row, prompt in enumerate(prompts)
    ]


@contextmanager
def start_engine(
    config: EngineConfig,
    stager: Stager | None = None,
    weights: WeightSource | None = None,
    backend: Backend | None = None,
) -> Iterator[RunningEngine]:
    """Start an engine in this process. Without `stager`, it has a staging process for the configured tiers."""
    wake = threading.Event()
    assembled = assemble_engine(config, wake.set, stager, weights, backend)
    try:
        yield RunningEngine(assembled, wake)
    finally:
        assembled.adapters.close()
