"""A server that answers every request with the same bytes."""

from __future__ import annotations

import itertools
import socket
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

from loramux.admin.client.openai_server import OpenAIServer


@contextmanager
def byte_server(
    pieces: Sequence[bytes], *, closes: bool = True, num_connections: int | None = None
) -> Iterator[OpenAIServer]:
    """Send the pieces after each request, and then close the connection. With `num_connections`, stop after as many."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            with suppress(OSError):
                for _ in itertools.repeat(None) if num_connections is None else range(num_connections):
                    connection, _ = listener.accept()
                    threading.Thread(target=answer, args=(connection,), daemon=True).start()
                listener.close()

        def answer(connection: socket.socket) -> None:
            with connection, suppress(OSError):
                while _read_request(connection):
                    for piece in pieces:
                        connection.sendall(piece)
                    if closes:
                        return

        port = listener.getsockname()[1]
        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield OpenAIServer(url=f"http://127.0.0.1:{port}/v1", key=None)
        finally:
            with suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)
            thread.join()


def _read_request(connection: socket.socket) -> bool:
    data = b""
    while b"\r\n\r\n" not in data:
        if not (more := connection.recv(1 << 16)):
            return False
        data += more
    head, _, body = data.partition(b"\r\n\r\n")
    length = next((int(line[15:]) for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")), 0)
    while len(body) < length:
        body += connection.recv(1 << 16)
    return True


def events(*documents: str) -> bytes:
    """A whole response whose body has these events."""
    body = "".join(f"data: {document}\n\n" for document in documents).encode()
    return b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ncontent-length: %d\r\n\r\n" % len(body) + body
