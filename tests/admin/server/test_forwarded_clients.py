from __future__ import annotations

import json
import socket
from contextlib import ExitStack
from http.client import HTTPResponse

import pytest

from loramux.admin.server.client_addresses import TrustedProxies, origin_of
from loramux.admin.server.connection_limits import ConnectionLimits
from tests.admin.server.bounded_listener import answer, listening
from tests.adversary.socket_flood import request


@pytest.mark.parametrize(
    ("forwarded_for", "client"),
    [
        pytest.param("198.51.100.7", "198.51.100.7", id="one"),
        pytest.param("203.0.113.9, 198.51.100.7", "198.51.100.7", id="client's own claim on the left"),
        pytest.param("198.51.100.7, 10.1.2.3", "198.51.100.7", id="two trusted proxies"),
        pytest.param("198.51.100.7:4711", "198.51.100.7", id="port"),
        pytest.param("[2001:db8::1]:4711", "2001:db8::1", id="IPv6 with port"),
        pytest.param("2001:db8::1", "2001:db8::1", id="IPv6"),
        pytest.param("::ffff:198.51.100.7", "198.51.100.7", id="mapped"),
        pytest.param("", "127.0.0.1", id="empty"),
        pytest.param("unknown", "127.0.0.1", id="no address"),
        pytest.param("198.51.100.7, unknown", "127.0.0.1", id="no address on the right"),
        pytest.param("unknown, 10.1.2.3", "10.1.2.3", id="no address behind a proxy"),
        pytest.param("fe80::1%" + "x" * 9000, "fe80::1", id="a long zone"),
        pytest.param("1" * 9000, "127.0.0.1", id="long"),
        pytest.param("'; DROP TABLE audit_log; --", "127.0.0.1", id="hostile"),
        pytest.param("10.9.9.9, 10.1.2.3", "10.9.9.9", id="proxies only"),
    ],
)
def test_client_is_the_rightmost_untrusted_address(forwarded_for: str, client: str) -> None:
    assert TrustedProxies(("127.0.0.1", "10.0.0.0/8")).client_of("127.0.0.1", forwarded_for) == client


@pytest.mark.parametrize(
    ("address", "origin"),
    [
        ("198.51.100.7", "198.51.100.7"),
        ("::ffff:198.51.100.7", "198.51.100.7"),
        ("2001:db8:0:1:2:3:4:5", "2001:db8:0:1::/64"),
        ("fe80::1%eth0", "fe80::/64"),
        ("", ""),
    ],
)
def test_ipv6_clients_are_counted_by_network_prefix(address: str, origin: str) -> None:
    assert origin_of(address) == origin


@pytest.mark.parametrize(
    ("proxies", "seen"),
    [
        pytest.param((), ["127.0.0.1", "http"], id="no trusted proxy"),
        pytest.param(("10.0.0.0/8",), ["127.0.0.1", "http"], id="another proxy is trusted"),
        pytest.param(("127.0.0.0/8",), ["198.51.100.7", "https"], id="believed"),
    ],
)
def test_only_trusted_proxies_are_believed(
    proxies: tuple[str, ...], seen: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # uvicorn's own environment variable must have no effect.
    monkeypatch.setenv("FORWARDED_ALLOW_IPS", "*")
    told = {"x-forwarded-for": "203.0.113.9, 198.51.100.7", "x-forwarded-proto": "https"}
    with listening(proxies=proxies) as listener, listener.open(request("GET", "/", told)) as connection:
        assert json.loads(answer(connection)[1]) == seen


def test_behind_a_trusted_proxy_requests_are_counted_by_forwarded_address() -> None:
    limits = ConnectionLimits(max_connections=20, max_per_address=2)
    with listening(limits, ("127.0.0.1",), root_path="/prefix") as listener, ExitStack() as stack:

        def ask(client: str, path: str = "/") -> socket.socket:
            return stack.enter_context(listener.open(request("GET", path, {"x-forwarded-for": client})))

        asking = [ask("198.51.100.7", "/wait") for _ in range(2)]
        listener.wait_until(lambda: listener.num_waiting == 2)
        refused = HTTPResponse(ask("203.0.113.9, 198.51.100.7"))
        refused.begin()
        assert (refused.status, int(refused.headers["retry-after"])) == (429, 1)
        assert refused.headers["x-request-id"].startswith("req_")
        assert json.loads(refused.read())["error"]["code"] == "too_many_connections"
        for path in ("/v1/messages", "/prefix/v1/messages"):
            status, told = answer(ask("198.51.100.7", path))
            assert (status, json.loads(told).get("type")) == (429, "error"), "in Anthropic's form"
        assert listener.num_refused("forwarded_address_full") == 3
        # Neither the proxy's connections nor other clients' requests count towards this client's limit.
        assert [answer(ask(f"198.51.100.{number}"))[0] for number in range(8, 14)] == [200] * 6
        listener.call(listener.may_end.set)
        assert [answer(one)[0] for one in asking] == [200] * 2
        assert answer(ask("198.51.100.7"))[0] == 200
