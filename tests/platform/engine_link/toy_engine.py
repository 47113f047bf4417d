"""A fake engine process that starts almost instantly: `toy_engine.py DIRECTORY SOCKET RECORD`.

If DIRECTORY contains a file `fails`, the engine exits with the file's text as its error. If DIRECTORY contains a file
`hangs`, the engine's loop stops.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import msgspec
import zmq

from loramux.engine.protocol.messages import EngineReady
from loramux.engine.server.step_record import StepRecord


def main() -> None:
    directory, path, record = Path(sys.argv[1]), sys.argv[2], StepRecord(int(sys.argv[3]))
    sys.stdin.buffer.readline()
    if (directory / "fails").exists():
        sys.exit((directory / "fails").read_text())
    context = zmq.Context()
    socket = context.socket(zmq.ROUTER)
    socket.bind(f"ipc://{path}")
    poller = zmq.Poller()
    poller.register(socket, zmq.POLLIN)
    poller.register(sys.stdin.fileno(), zmq.POLLIN)
    ready = EngineReady(max_model_len=64, num_pages=4, page_tokens=16, device="cpu", dtype="float32")
    while True:
        while (directory / "hangs").exists():
            time.sleep(0.01)
        events = dict(poller.poll(20))
        if sys.stdin.fileno() in events:
            break
        if socket in events:
            owner, _ = socket.recv_multipart()
            socket.send_multipart([owner, msgspec.msgpack.encode(ready)])
        record.note_pass()
    context.destroy(linger=0)


if __name__ == "__main__":
    main()
