"""A worker of a tensor-parallel engine: `python -m loramux.engine.server.worker_process SOCKET MEETING NUMBER`.

SOCKET is the file descriptor of the connection to worker 0, the engine process, from which the configuration comes as
JSON. MEETING is the file through which the workers find each other, and NUMBER is this worker's. The process ends when
the engine process does, however that ends.
"""

from __future__ import annotations

import signal
import sys
from multiprocessing.connection import Connection
from pathlib import Path

import msgspec

from loramux.adapter_store.sandbox.confinement import end_with_parent
from loramux.engine.loop.assembly import assemble_worker
from loramux.engine.loop.config import EngineConfig
from loramux.engine.parallel.gloo_group import GlooGroup
from loramux.engine.protocol.errors import EngineError
from loramux.engine.server.gc_freeze import freeze_gc
from loramux.engine.server.process import EXIT_REFUSED


def main() -> None:
    end_with_parent()
    # Ctrl-C is sent to the whole process group. The engine process decides when the workers exit.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    connection = Connection(int(sys.argv[1]))
    try:
        config = msgspec.json.decode(connection.recv_bytes(), type=EngineConfig)
        group = GlooGroup(Path(sys.argv[2]), config.tensor_parallel_size, int(sys.argv[3]))
        worker = assemble_worker(config, group)
    except EOFError:
        # The engine process ended.
        return
    except (EngineError, ValueError) as error:
        print(str(error), file=sys.stderr)
        sys.exit(EXIT_REFUSED)
    connection.send_bytes(b"loaded")
    group.join()
    connection.send_bytes(b"joined")
    freeze_gc()
    worker.serve(connection)
    group.close()


if __name__ == "__main__":
    main()
