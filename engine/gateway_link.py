"""The engine's side of one gateway: credits, so that a slow reader costs memory for its own tokens alone."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from loramux.engine.messages import Finished, FromEngine, SequenceOutput, StepOutput

Send = Callable[[FromEngine], None]


class GatewayLink:
    """Sends at most as many StepOutput messages as the gateway has granted.

    Without credit, the new tokens of a sequence join those that already wait, and its end waits behind them; the
    batch never waits, and nothing is dropped.
    """

    def __init__(self, send: Send) -> None:
        self._send = send
        self._credit = 0
        self._held: dict[str, SequenceOutput] = {}
        self._held_ends: list[Finished] = []

    def grant(self, count: int) -> None:
        self._credit += count
        self._flush()

    def post(self, message: FromEngine) -> None:
        match message:
            case StepOutput(outputs=outputs):
                for output in outputs:
                    held = self._held.get(output.sequence_id)
                    self._held[output.sequence_id] = output if held is None else _joined(held, output)
            case Finished():
                self._held_ends.append(message)
            case _:
                self._send(message)
                return
        self._flush()

    def _flush(self) -> None:
        if self._held and self._credit > 0:
            self._credit -= 1
            self._send(StepOutput(outputs=tuple(self._held.values())))
            self._held.clear()
        waiting = []
        for end in self._held_ends:
            if end.sequence_id in self._held:
                waiting.append(end)
            else:
                self._send(end)
        self._held_ends = waiting


def _joined(first: SequenceOutput, second: SequenceOutput) -> SequenceOutput:
    return msgspec.structs.replace(
        first, token_ids=first.token_ids + second.token_ids, logprobs=first.logprobs + second.logprobs
    )
