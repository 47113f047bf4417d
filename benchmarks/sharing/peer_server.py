"""A server that only relays: `peer_server SOCKET`. It exchanges certificates over standard input and output."""

from __future__ import annotations

import asyncio
import json
import socket
import sys
from pathlib import Path

import uvloop

from loramux.platform.replicas.certificates import OwnCertificates, read_certificates
from loramux.platform.replicas.peer_listener import PeerListener


class RunningEngine:
    def __init__(self, socket_path: Path) -> None:
        self.socket_path = socket_path
        self.is_ready = True
        self.ran_at_death: frozenset[str] = frozenset()


async def serve() -> None:
    own = OwnCertificates("server")
    with socket.create_server(("127.0.0.1", 0)) as bound:
        listener = PeerListener(bound, RunningEngine(Path(sys.argv[1])), print)
        print(json.dumps({"port": bound.getsockname()[1], "certificates": own.pem}), flush=True)
        friend = json.loads(sys.stdin.readline())["certificates"]
        listener.accept_from(own.in_use, {"client": read_certificates("client", friend)})
        listener.start()
        print("ready", flush=True)
        await asyncio.to_thread(sys.stdin.read)
        await listener.close()


if __name__ == "__main__":
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(serve())
