"""A worker of a tensor-parallel engine.

The command line is `python -m loramux.engine.server.worker_process SOCKET MEETING NUMBER ENGINE`. SOCKET is the file
descriptor of the connection to worker 0, the engine process, from which the configuration comes as JSON. MEETING is the
file through which the workers find each other, NUMBER is this worker's, and ENGINE is the PID of the engine process.
The process ends when the engine process does, however that ends. If it ends with EXIT_REFUSED or EXIT_DEVICE_FAILED,
the reason is the last line on standard error.
"""

from __future__ import annotations

import os
import signal
import sys
from multiprocessing.connection import Connection
from pathlib import Path

from loramux.adapter_store.sandbox.confinement import end_with_parent


def main() -> None:
    end_with_parent()
    if os.getppid() != int(sys.argv[4]):
        # The engine process ended before the call above, so no signal will come.
        return
    # Ctrl-C is sent to the whole process group. The engine process decides when the workers exit.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with Connection(int(sys.argv[1])) as connection:
        try:
            _work(connection, Path(sys.argv[2]), int(sys.argv[3]))
        except (EOFError, ConnectionError):
            # The engine process has closed the connection.
            return


def _work(connection: Connection, meeting: Path, number: int) -> None:
    # Imported here because torch takes seconds to import, and the process must end with the engine process before that.
    import msgspec

    from loramux.engine.architectures.model_files import base_sha256
    from loramux.engine.loop.assembly import assemble_worker
    from loramux.engine.loop.config import EngineConfig
    from loramux.engine.parallel.process_groups import new_group
    from loramux.engine.protocol.errors import EngineError
    from loramux.engine.server.gc_freeze import freeze_gc
    from loramux.engine.server.process import EXIT_DEVICE_FAILED, EXIT_REFUSED, end_for_device

    def join() -> None:
        base = base_sha256(Path(config.model_dir))
        connection.send_bytes(b"")
        connection.send_bytes(base.encode())
        # All workers wait here, because those that join wait only briefly for the others.
        connection.recv_bytes()
        group.join()

    config = msgspec.json.decode(connection.recv_bytes(), type=EngineConfig)
    group = new_group(config.device, meeting, config.tensor_parallel_size, number)
    try:
        try:
            worker = assemble_worker(config, group, join)
        except (EngineError, ValueError) as error:
            connection.send_bytes(str(error).encode())
            # Once the workers are connected, the engine process ends soon after a worker, and must read this before.
            # It closes the connection then, which raises EOFError.
            connection.recv_bytes()
            return
        connection.send_bytes(b"")
        freeze_gc()
        worker.serve(connection)
    except EngineError as error:
        print(str(error), file=sys.stderr, flush=True)
        os._exit(EXIT_REFUSED)
    except Exception as error:
        end_for_device(error, f"the GPU of tensor-parallel worker {number} failed", EXIT_DEVICE_FAILED)
        raise
    finally:
        group.close()


if __name__ == "__main__":
    main()
