"""Ports are taken before anything slow begins and listened on only once everything stands."""

from __future__ import annotations

import ipaddress
import os
import socket

from loramux.admin.errors import StartRefused


def bind(host: str, port: int, setting: str) -> socket.socket:
    """A bound socket that does not listen yet; raises StartRefused, naming the setting that chose the port."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
        try:
            # Connections of an earlier run that still linger do not keep the port.
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
        except OSError:
            listener.close()
            raise
    except OSError as error:
        reason = os.strerror(error.errno) if error.errno and error.errno > 0 else str(error)
        raise StartRefused(
            f"cannot listen on {host} port {port}: {reason.lower()}; choose another with --{setting.replace('_', '-')}"
        ) from None
    listener.setblocking(False)
    return listener


def url_of(listener: socket.socket) -> str:
    """Where a client on this machine finds the listener."""
    host, port = listener.getsockname()[:2]
    if ipaddress.ip_address(host).is_unspecified:
        host = "127.0.0.1" if listener.family == socket.AF_INET else "::1"
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def is_loopback(listener: socket.socket) -> bool:
    """Whether only this machine can reach the listener."""
    return ipaddress.ip_address(listener.getsockname()[0]).is_loopback
