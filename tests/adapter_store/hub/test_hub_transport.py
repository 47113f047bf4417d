"""The hub's redirects lead only to public addresses and to the hub's own host."""

from __future__ import annotations

import datetime
import ssl
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import httpx
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from loramux.adapter_store.errors import AdapterRejected, SourceUnavailable
from loramux.adapter_store.hub.hub_client import HubClient
from loramux.adapter_store.hub.hub_transport import HubTransport, is_public
from tests.adapter_store.hub.local_hub import LocalHub, running_hub

TENSORS = "adapter_model.safetensors"
CONTENT = b"weights"
STORE = "127.0.0.3"
"""An address of this machine that the tests declare public. The hub and other servers are on 127.0.0.1."""


@pytest.fixture
def hub() -> Iterator[LocalHub]:
    with running_hub() as hub:
        hub.push("acme/support", {TENSORS: CONTENT})
        yield hub


class Names:
    """Resolves names to addresses, and counts the questions. A list of lists gives successive answers."""

    def __init__(self, **addresses: Sequence[Sequence[str]]) -> None:
        self._addresses = {name: list(answers) for name, answers in addresses.items()}
        self.asked: list[str] = []

    def __call__(self, host: str, port: int) -> Sequence[str]:
        self.asked.append(host)
        answers = self._addresses.get(host)
        if not answers:
            raise OSError("no such name")
        return answers.pop(0)


@contextmanager
def store(context: ssl.SSLContext | None = None, address: str = STORE) -> Iterator[tuple[int, list[tuple[str, str]]]]:
    """A server that returns CONTENT. Yields its port, and the path and Host header of each request."""
    seen: list[tuple[str, str]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            seen.append((self.path, self.headers["host"]))
            assert "authorization" not in self.headers
            self.send_response(200)
            self.send_header("content-length", str(len(CONTENT)))
            self.end_headers()
            self.wfile.write(CONTENT)

        def log_message(self, *_: object) -> None:
            """Print nothing."""

    server = ThreadingHTTPServer((address, 0), Handler)
    if context is not None:
        server.socket = context.wrap_socket(server.socket, server_side=True)
    thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield server.server_port, seen
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def downloaded(hub: LocalHub, location: str, connect: Callable[[str], httpx.BaseTransport] = HubTransport) -> bytes:
    """Download a file that the hub redirects to `location`."""
    hub.faults["/resolve/"] = lambda answer: answer.headers.update(location=location)
    client = HubClient(hub.url, "hf_token", connect)
    commit = client.resolve("acme/support", "main")
    return b"".join(client.chunks("acme/support", commit, TENSORS, len(CONTENT)))


def connecting(names: Names) -> Callable[[str], HubTransport]:
    """Transports for which STORE is the only public address."""
    return lambda endpoint: HubTransport(endpoint, names, lambda address: address == STORE)


@pytest.mark.parametrize(
    "address", ["8.8.8.8", "2001:4860:4860::8888", "64:ff9b::808:808", "::ffff:8.8.8.8", "2002:808:808::1"]
)
def test_public_address(address: str) -> None:
    assert is_public(address)


@pytest.mark.parametrize(
    "address",
    [
        *("127.0.0.1", "127.8.9.10", "0.0.0.0", "0.1.2.3", "10.1.2.3", "172.16.0.1", "192.168.1.1", "100.64.0.1"),
        *("169.254.169.254", "224.0.0.1", "239.1.2.3", "240.0.0.1", "255.255.255.255", "192.0.2.1", "198.18.0.1"),
        *("::", "::1", "fe80::1", "fe80::1%eth0", "fec0::1", "fc00::1", "fd00:ec2::254", "ff02::1", "2001:db8::1"),
        *("::ffff:127.0.0.1", "::ffff:10.0.0.1", "::127.0.0.1", "64:ff9b::7f00:1", "64:ff9b:1::a00:1"),
        *("2002:7f00:1::", "2001:0:7f00:1::", "4000::1"),
    ],
)
def test_address_that_is_not_public(address: str) -> None:
    assert not is_public(address)


@pytest.mark.parametrize(
    "location",
    [
        *("http://127.0.0.2:{port}/x", "http://localhost:{port}/x", "http://0:{port}/x"),
        *("http://[::1]:{port}/x", "http://[::ffff:127.0.0.1]:{port}/x", "http://2130706433:{port}/x"),
        *("http://0x7f.1:{port}/x", "https://10.0.0.1/x", "http://169.254.169.254/latest", "//192.168.0.1/x"),
        *("ftp://127.0.0.1:{port}/x", "file:///etc/passwd", "http://user:password@127.0.0.1:{port}/x"),
        "http://user:password@8.8.8.8/x",
    ],
)
def test_redirect_to_another_place_is_refused(hub: LocalHub, location: str) -> None:
    with store(address="127.0.0.1") as (port, seen):
        with pytest.raises((AdapterRejected, SourceUnavailable)) as error:
            downloaded(hub, location.format(port=port))
        assert not seen
    if not location.startswith("file"):
        assert isinstance(error.value, AdapterRejected)
        assert (error.value.code, error.value.param) == ("source_not_allowed", "source")
        assert "password@" not in error.value.message


def test_redirect_to_a_name_of_a_private_address_is_refused(hub: LocalHub) -> None:
    with store(address="127.0.0.1") as (port, seen):
        for answers in (["127.0.0.1"], [STORE, "127.0.0.1"], ["127.0.0.1", STORE]):
            with pytest.raises(AdapterRejected) as error:
                downloaded(hub, f"http://store.test:{port}/x", connecting(Names(**{"store.test": [answers]})))
            assert error.value.code == "source_not_allowed"
        assert not seen


def test_redirect_to_a_public_address_is_followed_without_the_token(hub: LocalHub) -> None:
    names = Names(**{"store.test": [[STORE]]})
    with store() as (port, seen):
        assert downloaded(hub, f"http://store.test:{port}/x?signature=1", connecting(names)) == CONTENT
        assert seen == [("/x?signature=1", f"store.test:{port}")]


def test_a_name_that_changes_after_the_check_is_not_followed(hub: LocalHub) -> None:
    names = Names(**{"store.test": [[STORE], ["127.0.0.1"]]})
    with store() as (port, seen):
        assert downloaded(hub, f"http://store.test:{port}/x", connecting(names)) == CONTENT
        assert len(seen) == 1
    assert names.asked == ["store.test"]


def test_each_of_several_addresses_is_tried(hub: LocalHub) -> None:
    names = Names(**{"store.test": [["127.0.0.5", STORE]]})
    with store() as (port, seen):
        allowed = {"127.0.0.5", STORE}
        assert (
            downloaded(hub, f"http://store.test:{port}/x", lambda url: HubTransport(url, names, allowed.__contains__))
            == CONTENT
        )
        assert len(seen) == 1


def test_name_without_an_address_is_temporary(hub: LocalHub) -> None:
    for answers in ([], [[]]):
        with pytest.raises(SourceUnavailable):
            downloaded(hub, "http://store.test/x", connecting(Names(**{"store.test": answers})))


def test_every_redirect_of_a_chain_is_checked(hub: LocalHub) -> None:
    hub.faults["/store/"] = lambda answer: answer.__init__(302, headers={"location": "http://127.0.0.2/x"})  # type: ignore[misc]
    with pytest.raises(AdapterRejected) as error:
        downloaded(hub, f"{hub.store_url}/store/acme/support/{hub.revisions['acme/support', 'main']}/{TENSORS}")
    assert error.value.code == "source_not_allowed"
    assert any(path.startswith("/store/") for path, _ in hub.requests), "the hub's own host may serve downloads"


def test_redirect_from_https_to_http_is_refused() -> None:
    transport = HubTransport("https://hub.test", Names(), lambda _: True)
    for host in ("hub.test", "8.8.8.8"):
        with pytest.raises(AdapterRejected) as error:
            transport.handle_request(httpx.Request("GET", f"http://{host}/x"))
        assert error.value.message.endswith("does not use https")


def test_redirect_to_a_host_that_is_no_name_is_a_failure(hub: LocalHub) -> None:
    with pytest.raises(SourceUnavailable):
        downloaded(hub, "http://xn--a/x", connecting(Names()))


def test_names_are_looked_up_and_sent_as_they_are_spelled_in_ascii(hub: LocalHub) -> None:
    """The system would look up `straße` as `strasse`, another host."""
    names = Names(**{"xn--strae-oqa.test": [[STORE]]})
    with store() as (port, seen):
        assert downloaded(hub, f"http://xn--strae-oqa.test:{port}/x", connecting(names)) == CONTENT
        assert seen == [("/x", f"xn--strae-oqa.test:{port}")]


def certificate(name: str, folder: Path) -> ssl.SSLContext:
    """A server's context with a self-signed certificate, which is also written to `folder`/cert.pem."""
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])
    now = datetime.datetime.now(datetime.UTC)
    made = (
        x509.CertificateBuilder(subject, subject, key.public_key(), x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(name)]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    (folder / "cert.pem").write_bytes(made.public_bytes(serialization.Encoding.PEM))
    (folder / "key.pem").write_bytes(
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    )
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(folder / "cert.pem", folder / "key.pem")
    return context


@pytest.mark.parametrize(("name", "is_right"), [("store.test", True), ("other.test", False), (STORE, False)])
def test_the_certificate_must_name_the_host(
    hub: LocalHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, is_right: bool
) -> None:
    context = certificate(name, tmp_path)
    monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "cert.pem"))
    names = Names(**{"store.test": [[STORE]]})
    with store(context) as (port, seen):
        if is_right:
            assert downloaded(hub, f"https://store.test:{port}/x", connecting(names)) == CONTENT
        else:
            with pytest.raises(SourceUnavailable):
                downloaded(hub, f"https://store.test:{port}/x", connecting(names))
        assert len(seen) == is_right


@pytest.fixture
def proxied(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[str, str]]]:
    with store(address="127.0.0.1") as (port, seen):
        for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY", "https_proxy", "all_proxy", "no_proxy"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setenv("http_proxy", f"127.0.0.1:{port}")
        yield seen


def test_a_proxy_resolves_names(hub: LocalHub, proxied: list[tuple[str, str]]) -> None:
    seen = proxied
    names = Names()
    assert downloaded(hub, "http://store.test/x", connecting(names)) == CONTENT
    assert seen == [("http://store.test/x", "store.test")]
    assert not names.asked
    for host in ("localhost", "a.localhost", "127.1", "[::1]", "10.0.0.1"):
        with pytest.raises(AdapterRejected) as error:
            downloaded(hub, f"http://{host}/x")
        assert error.value.code == "source_not_allowed"
    assert len(seen) == 1


def test_hosts_without_a_proxy_are_resolved_here(
    hub: LocalHub, proxied: list[tuple[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("no_proxy", "store.test")
    with store() as (port, seen):
        names = Names(**{"store.test": [[STORE]]})
        assert downloaded(hub, f"http://store.test:{port}/x", connecting(names)) == CONTENT
        assert len(seen) == 1
    assert not proxied
