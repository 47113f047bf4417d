"""An engine without a model: `python -m benchmarks.gateway.scripted_engine SOCKET SCRIPT`. SCRIPT is JSON.

It speaks the engine's protocol and uses the engine's own `GatewayLink`. Only the gateway is measured, so the engine
does as little as it can.
"""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass
from typing import Any

import msgspec
import zmq

from loramux.engine.protocol.messages import (
    Abort,
    Add,
    Credit,
    EngineReady,
    Finished,
    FromEngine,
    SequenceOutput,
    StepOutput,
    ToEngine,
)
from loramux.engine.server.gateway_link import GatewayLink

IDLE_S = 0.25
MAX_MODEL_LEN = 4096


class EngineScript(msgspec.Struct, frozen=True, kw_only=True):
    model_sha256: str
    token_ids: tuple[int, ...]


@dataclass(slots=True)
class Running:
    add: Add
    num_committed: int = 0
    num_emitted: int = 0

    @property
    def step_s(self) -> float:
        return (self.add.sampling.seed or 0) / 1e6


class ScriptedEngine:
    """Gives each running sequence one token per step, as an engine does."""

    def __init__(self, socket: Any, script: EngineScript) -> None:
        self._socket = socket
        self._script = script
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(ToEngine)
        self._links: dict[bytes, GatewayLink] = {}
        self._running: dict[tuple[bytes, str], Running] = {}
        self._next_step_s = 0.0

    def serve(self) -> None:
        while True:
            left_s = self._next_step_s - time.perf_counter() if self._running else IDLE_S
            if left_s >= 1e-3:
                self._socket.poll(int(left_s * 1e3))
            elif left_s > 0:
                # A poll can wait only for whole milliseconds.
                time.sleep(left_s)
            self._receive()
            if self._running and time.perf_counter() >= self._next_step_s:
                self._step()

    def _receive(self) -> None:
        while True:
            try:
                owner, data = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            link = self._link(owner)
            match self._decoder.decode(data):
                case Add() as add:
                    self._running[owner, add.sequence_id] = Running(add)
                case Abort(sequence_id=sequence_id):
                    running = self._running.pop((owner, sequence_id), None)
                    if running is not None:
                        link.post(_finished(running, "abort"))
                case Credit(count=count):
                    link.grant(count)

    def _link(self, owner: bytes) -> GatewayLink:
        link = self._links.get(owner)
        if link is None:
            link = self._links[owner] = GatewayLink(lambda message: self._send(owner, message))
            link.post(
                EngineReady(
                    max_model_len=MAX_MODEL_LEN,
                    num_pages=1,
                    page_tokens=16,
                    device="script",
                    dtype="none",
                    model_sha256=self._script.model_sha256,
                )
            )
        return link

    def _step(self) -> None:
        outputs: dict[bytes, list[SequenceOutput]] = {}
        ended = []
        for key, running in self._running.items():
            add = running.add
            # Without a step time, the whole answer is ready at once.
            running.num_committed = running.num_committed + 1 if running.step_s else add.max_tokens
            is_last = running.num_committed >= add.max_tokens
            if is_last or running.num_committed - running.num_emitted >= add.tokens_at_once:
                outputs.setdefault(key[0], []).append(self._output(running))
            if is_last:
                ended.append(key)
        for owner, own in outputs.items():
            self._links[owner].post(StepOutput(outputs=tuple(own)))
        for key in ended:
            self._links[key[0]].post(_finished(self._running.pop(key), "length"))
        step_s = max((running.step_s for running in self._running.values()), default=0.0)
        self._next_step_s = max(time.perf_counter(), self._next_step_s + step_s)

    def _output(self, running: Running) -> SequenceOutput:
        known, span = self._script.token_ids, range(running.num_emitted, running.num_committed)
        running.num_emitted = running.num_committed
        return SequenceOutput(
            sequence_id=running.add.sequence_id, token_ids=tuple(known[position % len(known)] for position in span)
        )

    def _send(self, owner: bytes, message: FromEngine) -> None:
        self._socket.send_multipart([owner, self._encoder.encode(message)], zmq.NOBLOCK)


def _finished(running: Running, reason: str) -> Finished:
    return Finished(
        sequence_id=running.add.sequence_id,
        reason=reason,
        prompt_tokens=len(running.add.prompt),
        completion_tokens=running.num_committed,
    )


def main() -> None:
    path, script = sys.argv[1], msgspec.json.decode(sys.argv[2], type=EngineScript)
    socket = zmq.Context().socket(zmq.ROUTER)
    socket.setsockopt(zmq.SNDHWM, 0)
    socket.setsockopt(zmq.RCVHWM, 0)
    socket.bind(f"ipc://{path}")
    ScriptedEngine(socket, script).serve()


if __name__ == "__main__":
    main()
