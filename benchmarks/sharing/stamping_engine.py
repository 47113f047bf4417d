"""A fake engine process that sends the current time as each token's ID: `stamping_engine SOCKET INTERVAL_MS`.

The first token of a sequence is sent at once. Later tokens follow at the interval, in one message for all sequences of
a client, like the tokens of an engine's step. Times are microseconds of CLOCK_MONOTONIC, which all processes of one
machine share. They are counted modulo 2^31, because a peer's larger tokens are refused.
"""

from __future__ import annotations

import sys
import time

import msgspec
import zmq

from loramux.engine.protocol.messages import (
    Add,
    EngineReady,
    Finished,
    FromEngine,
    SequenceOutput,
    StepOutput,
    ToEngine,
)

READY = EngineReady(max_model_len=1 << 20, num_pages=1, page_tokens=1, device="cpu", dtype="float32")


WRAP_US = 1 << 31


def now_us() -> int:
    return time.monotonic_ns() // 1000 % WRAP_US


def passed_us(since_us: int) -> int:
    return (now_us() - since_us) % WRAP_US


def main() -> None:
    path, interval_s = sys.argv[1], float(sys.argv[2]) / 1000
    socket = zmq.Context().socket(zmq.ROUTER)
    socket.bind(f"ipc://{path}")
    decoder, encoder = msgspec.msgpack.Decoder(ToEngine), msgspec.msgpack.Encoder()
    known: set[bytes] = set()
    adds: dict[tuple[bytes, str], Add] = {}
    left: dict[tuple[bytes, str], int] = {}

    def send(owner: bytes, message: FromEngine) -> None:
        socket.send_multipart([owner, encoder.encode(message)])

    def emit(keys: list[tuple[bytes, str]]) -> None:
        for owner in {owner for owner, _ in keys}:
            names = [name for other, name in keys if other == owner]
            stamp = (now_us(),)
            send(owner, StepOutput(outputs=tuple(SequenceOutput(sequence_id=name, token_ids=stamp) for name in names)))
            for name in names:
                left[owner, name] -= 1
                if left[owner, name] == 0:
                    del left[owner, name]
                    send(owner, _end(adds.pop((owner, name))))

    next_s = time.monotonic() + interval_s
    while True:
        if socket.poll(int(max(0.0, next_s - time.monotonic()) * 1000)):
            owner, data = socket.recv_multipart()
            if owner not in known:
                known.add(owner)
                send(owner, READY)
            message = decoder.decode(data)
            if isinstance(message, Add):
                adds[owner, message.sequence_id] = message
                left[owner, message.sequence_id] = message.max_tokens
                emit([(owner, message.sequence_id)])
        if time.monotonic() >= next_s:
            next_s += interval_s
            emit(list(left))


def _end(add: Add) -> Finished:
    """Gateways refuse an end whose counts are not those of the sequence."""
    return Finished(
        sequence_id=add.sequence_id,
        reason="length",
        prompt_tokens=len(add.prompt),
        completion_tokens=add.max_tokens,
    )


if __name__ == "__main__":
    main()
