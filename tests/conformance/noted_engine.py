"""An engine that notes what became of each sequence and its drafts, independently of the engine's own counts."""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Mapping
from itertools import takewhile
from typing import Any, TextIO

import msgspec

from loramux.engine.drafting.draft import Draft, DraftRoom
from loramux.engine.loop.engine import Outbound
from loramux.engine.protocol.messages import Add, Finished, StepOutput
from loramux.engine.sequences.batch import ScheduledSequence
from loramux.engine.sequences.sequence import Sequence
from tests.conformance.noted_ends import NotedEnd
from tests.engine.simulated_engine import Simulation


class NotedEngine:
    """Appends a line to one file when a sequence ends, and to another for its arrival and for each of its outputs.

    `pace_s` is the time that a step takes at least. The engine must have no lookahead, so that each step commits its
    own tokens.
    """

    def __init__(self, simulation: Simulation, pace_s: float, ends: TextIO, outputs: TextIO | None) -> None:
        self._engine = simulation.engine
        self._clock = simulation.clock
        self._pace_s = pace_s
        self._ends = ends
        self._outputs = outputs
        self._sent: defaultdict[str, list[int]] = defaultdict(list)
        self._drafted: defaultdict[str, Counter[str]] = defaultdict(Counter)
        self._accepted: defaultdict[str, Counter[str]] = defaultdict(Counter)
        # The drafts of the newest step, and the numbers of tokens that their sequences had before.
        self._drafts: Mapping[Sequence, Draft] = {}
        self._num_before: dict[Sequence, int] = {}
        self._with_drafts = simulation.speculation.with_drafts
        simulation.speculation.with_drafts = self._add_drafts  # type: ignore[method-assign]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def add(self, owner: bytes, add: Add) -> None:
        self._note_arrival_or_output(add.sequence_id, 0)
        self._engine.add(owner, add)

    def step(self) -> bool:
        self._drafts, self._num_before = {}, {}
        # Pauses end in time. During a step the clock stands still, so the rows of drafts take no time, and pay.
        self._clock.now = time.monotonic()
        ran = self._engine.step()
        for sequence, draft in self._drafts.items():
            committed = sequence.tokens[self._num_before[sequence] :]
            if committed:
                pairs = zip(draft.tokens, committed, strict=False)
                num_accepted = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
                self._drafted[sequence.sequence_id][draft.source] += len(draft.tokens)
                self._accepted[sequence.sequence_id][draft.source] += num_accepted
        if ran:
            time.sleep(self._pace_s)
        return ran

    def take_outbox(self) -> list[Outbound]:
        outbox = self._engine.take_outbox()
        for outbound in outbox:
            match outbound.message:
                case Finished() as end:
                    self._note_end(end)
                case StepOutput(outputs=outputs):
                    for output in outputs:
                        self._note_arrival_or_output(output.sequence_id, len(output.token_ids))
                        if output.token_ids:
                            self._sent[output.sequence_id].append(len(output.token_ids))
        self._ends.flush()
        if self._outputs is not None:
            self._outputs.flush()
        return outbox

    def _add_drafts(
        self, scheduled: list[ScheduledSequence], room: DraftRoom, *, others_wait: bool
    ) -> tuple[list[ScheduledSequence], dict[Sequence, Draft]]:
        scheduled, drafts = self._with_drafts(scheduled, room, others_wait=others_wait)
        # The engine may shorten drafts until it has chosen the tokens.
        self._drafts = drafts
        self._num_before = {sequence: len(sequence.tokens) for sequence in drafts}
        return scheduled, drafts

    def _note_end(self, end: Finished) -> None:
        sent = self._sent.pop(end.sequence_id, [])
        # A stop token is committed without being sent.
        outputs = (*sent, 1) if end.stop_token_id is not None else tuple(sent)
        drafted, accepted = self._drafted.pop(end.sequence_id, {}), self._accepted.pop(end.sequence_id, {})
        drafts = {source: (num_drafted, accepted.get(source, 0)) for source, num_drafted in drafted.items()}
        self._ends.write(msgspec.json.encode(NotedEnd(end.sequence_id, end.prompt_tokens, outputs, drafts)).decode())
        self._ends.write("\n")

    def _note_arrival_or_output(self, sequence_id: str, num_tokens: int) -> None:
        if self._outputs is not None:
            self._outputs.write(f"{time.monotonic()} {sequence_id} {num_tokens}\n")
