from __future__ import annotations

import asyncio
import resource
import sqlite3
import sys
import tempfile
from typing import Any

import uvloop

from loramux.admin.server.connection_limits import make_room
from loramux.admin.server.connection_registry import ConnectionRegistry
from loramux.admin.server.http_servers import HttpServer
from loramux.admin.server.listeners import bind
from loramux.admin.server.logs import configure_logs


async def app(scope: Any, receive: Any, send: Any) -> None:
    with tempfile.NamedTemporaryFile() as file:
        connection = sqlite3.connect(file.name)
        connection.execute("CREATE TABLE facts (id INTEGER)")
        connection.execute("INSERT INTO facts VALUES (1)")
        (num_rows,) = connection.execute("SELECT count(*) FROM facts").fetchone()
        connection.close()
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": f"rows: {num_rows}".encode()})


def main(num_files: int) -> None:
    configure_logs()
    resource.setrlimit(resource.RLIMIT_NOFILE, (num_files, num_files))
    limits = make_room(4096, 1024)
    with bind("127.0.0.1", 0, "port") as listener:
        server = HttpServer(app, listener, ConnectionRegistry(limits.openai))

        async def serve() -> None:
            serving = asyncio.create_task(server.run_until_stopped())
            await server.is_listening.wait()
            print(listener.getsockname()[1], flush=True)
            await serving

        uvloop.run(serve())


if __name__ == "__main__":
    main(int(sys.argv[1]))
