"""The listeners' sockets. They are bound before anything slow starts, and listen only once everything is ready."""

from __future__ import annotations

import ipaddress
import socket

from loramux.admin.errors import StartRefused

MAX_UNSENT_BYTES = 16 * 1024
"""Maximum amount of unsent data that the kernel buffers per connection, in bytes."""


def bind(host: str, port: int, setting: str, is_shared: bool = False) -> socket.socket:
    """Return a bound socket that is not listening yet. Raises StartRefused, which names the setting to change.

    Several gateways can bind the same port if all of them set `is_shared`.
    """
    flag = f"--{setting.replace('_', '-')}"
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError):
        raise StartRefused(f"cannot resolve the host {host!r}; fix {flag.replace('port', 'host')}") from None
    family, kind, protocol, _, address = found[0]
    listener = socket.socket(family, kind, protocol)
    try:
        # This option lets the bind succeed while connections of an earlier run linger. It is cleared after the bind,
        # because otherwise another starting server could bind the port too.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if is_shared:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        listener.bind(address)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 0)
    except OSError as error:
        listener.close()
        reason = (error.strerror or str(error)).lower()
        raise StartRefused(f"cannot listen on {host} port {port}: {reason}; choose another with {flag}") from None
    listener.setblocking(False)
    return listener


def prepare_to_listen(listener: socket.socket) -> None:
    """Set the socket options that accepted connections inherit."""
    # This lets the next run bind the port while these connections linger.
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    # The kernel would otherwise buffer megabytes for each client that does not read.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, MAX_UNSENT_BYTES)


def url_of(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    if ipaddress.ip_address(host).is_unspecified:
        host = "127.0.0.1" if listener.family == socket.AF_INET else "::1"
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def is_loopback(listener: socket.socket) -> bool:
    """True if only this machine can reach the listener."""
    return ipaddress.ip_address(listener.getsockname()[0]).is_loopback
