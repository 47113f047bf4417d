from __future__ import annotations

import socket

import pytest

from loramux.admin.errors import StartRefused
from loramux.admin.server.listeners import bind, is_loopback, prepare_to_listen, url_of


def test_bound_port_refuses_connections_and_other_servers() -> None:
    with bind("127.0.0.1", 0, "port") as first:
        port = first.getsockname()[1]
        with socket.socket() as client:
            assert client.connect_ex(("127.0.0.1", port)) != 0
        with pytest.raises(StartRefused, match=f"port {port}: address already in use; choose another with --port"):
            bind("127.0.0.1", port, "port")


def test_port_in_time_wait_can_be_rebound() -> None:
    with bind("127.0.0.1", 0, "port") as first:
        first.setblocking(True)
        prepare_to_listen(first)
        first.listen()
        port = first.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port)) as client:
            # Close the server's side first, so that its address stays in TIME_WAIT.
            first.accept()[0].close()
            assert client.recv(1) == b""
    with bind("127.0.0.1", port, "port") as second:
        assert second.getsockname()[1] == port


@pytest.mark.parametrize(
    ("host", "url", "loopback"),
    [
        pytest.param("127.0.0.1", "http://127.0.0.1:{}", True, id="loopback"),
        pytest.param("localhost", "http://127.0.0.1:{}", True, id="by name"),
        pytest.param("0.0.0.0", "http://127.0.0.1:{}", False, id="everywhere"),
        pytest.param("::1", "http://[::1]:{}", True, id="ipv6"),
    ],
)
def test_listener_url_and_loopback_detection(host: str, url: str, loopback: bool) -> None:
    if host == "::1" and not socket.has_ipv6:
        pytest.skip("no IPv6 on this machine")
    with bind(host, 0, "port") as listener:
        port = listener.getsockname()[1]
        assert (url_of(listener), is_loopback(listener)) in [
            (url.format(port), loopback),
            (f"http://[::1]:{port}", loopback),
        ]


@pytest.mark.parametrize("host", ["no-such-host.invalid", "a" * 300, "a\x00b", "..", "256.1.1.1"])
def test_unknown_host_is_explained_in_one_sentence(host: str) -> None:
    with pytest.raises(StartRefused, match=r"cannot resolve the host .*; fix --admin-host"):
        bind(host, 0, "admin_port")
