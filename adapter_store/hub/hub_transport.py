"""Connections to the hub, and to the stores to which it redirects downloads."""

from __future__ import annotations

import ipaddress
import socket
import ssl
from collections.abc import Callable, Sequence
from functools import cache
from urllib.request import getproxies, proxy_bypass

import httpx

from loramux.adapter_store.errors import AdapterRejected

Resolve = Callable[[str, int], Sequence[str]]
"""Returns the addresses of a host. Raises OSError if it has none."""

_GLOBAL_UNICAST = ipaddress.ip_network("2000::/3")
_NAT64 = ipaddress.ip_network("64:ff9b::/96")
"""Addresses in IPv6 networks that stand for the IPv4 address in their last 32 bits (RFC 6052)."""

_PRIVATE = tuple(map(ipaddress.ip_network, ("10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16", "fc00::/7")))
_METADATA = ipaddress.ip_network("fd00:ec2::/32")
"""Where a cloud's machines find their credentials. The IPv4 address for this, 169.254.169.254, is not private."""


def resolve(host: str, port: int) -> list[str]:
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(address[0]) for *_, address in found))


def host_of(url: httpx.URL) -> str:
    """Return the host as names are looked up and certificates are checked: in ASCII. `URL.host` decodes Punycode, and
    the system would encode some of those names differently.
    """
    return url.raw_host.decode("ascii")


def pinned(request: httpx.Request, address: str) -> httpx.Request:
    """Return a request to an address of the host. The headers name the host, and the certificate must be the host's."""
    return httpx.Request(
        request.method,
        request.url.copy_with(host=address),
        headers=request.headers,
        stream=request.stream,
        extensions={**request.extensions, "sni_hostname": host_of(request.url)},
    )


def is_public(address: str) -> bool:
    """Return whether an IP address is reachable on the Internet: not loopback, private, link-local, multicast or
    reserved, and not an IPv6 form of such an IPv4 address.
    """
    ip = ipaddress.ip_address(address)
    if isinstance(ip, ipaddress.IPv6Address):
        inner = ipaddress.IPv4Address(int(ip) & 0xFFFF_FFFF) if ip in _NAT64 else ip.ipv4_mapped or ip.sixtofour
        if inner is not None:
            return is_public(str(inner))
        return ip in _GLOBAL_UNICAST and ip.is_global
    return ip.is_global and not ip.is_multicast and not ip.is_reserved


def is_trusted_endpoint(url: str) -> bool:
    """Return whether tokens can be sent to a hub, and hashes be taken from it: over TLS, or on this machine."""
    try:
        parts = httpx.URL(url)
    except httpx.InvalidURL:
        return False
    if parts.scheme == "https":
        return bool(parts.raw_host)
    addresses = _addresses_in(host_of(parts)) if parts.scheme == "http" else []
    return bool(addresses) and all(map(_is_loopback, addresses))


def operators_rule(endpoint: str, resolve: Resolve = resolve) -> Callable[[str], bool]:
    """Return the rule for redirects of a hub that this machine's operator has chosen.

    If the hub itself has a private address, it may also redirect to private addresses, and a hub on this machine also
    to this machine. Any other hub may redirect only to public addresses.
    """

    @cache
    def own() -> Sequence[str]:
        url = httpx.URL(endpoint)
        try:
            return resolve(host_of(url), url.port or 443)
        except (OSError, UnicodeError):
            return ()

    def is_allowed(address: str) -> bool:
        if is_public(address):
            return True
        if _is_loopback(address):
            return any(map(_is_loopback, own()))
        return _is_private(address) and any(_is_private(one) or _is_loopback(one) for one in own())

    return is_allowed


class HubTransport(httpx.BaseTransport):
    """Sends requests to the hub's host, and redirected ones only to public addresses.

    Raises AdapterRejected for any other redirect. A redirect may use http only if the hub does. It connects to the
    address that was checked, so a name that resolves differently a moment later changes nothing. If a proxy from the
    environment serves the URL, the proxy resolves names, and only addresses in the URL itself are checked.
    `certificates` replaces the certificates of authorities that httpx trusts.
    """

    def __init__(
        self,
        endpoint: str,
        resolve: Resolve = resolve,
        is_allowed: Callable[[str], bool] = is_public,
        certificates: ssl.SSLContext | None = None,
    ) -> None:
        self._endpoint = httpx.URL(endpoint)
        self._resolve = resolve
        self._is_allowed = is_allowed
        self._verify = certificates or httpx.create_ssl_context()
        self._transports: dict[str | None, httpx.HTTPTransport] = {}

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        proxy = self._proxy_of(request.url)
        transport = self._transports.get(proxy)
        if transport is None:
            transport = self._transports[proxy] = httpx.HTTPTransport(verify=self._verify, proxy=proxy)
        self._check_form(request.url)
        if request.url.raw_host == self._endpoint.raw_host:
            return transport.handle_request(request)
        if proxy is not None:
            self._check_addresses(_addresses_in(host_of(request.url)))
            return transport.handle_request(request)
        return self._send_pinned(transport, request)

    def close(self) -> None:
        for transport in self._transports.values():
            transport.close()

    def _send_pinned(self, transport: httpx.HTTPTransport, request: httpx.Request) -> httpx.Response:
        """Check the host's addresses, and connect to the first one that accepts a connection."""
        url = request.url
        try:
            addresses = self._resolve(host_of(url), url.port or (443 if url.scheme == "https" else 80))
        except (OSError, UnicodeError) as error:
            raise httpx.ConnectError(f"the host has no address: {error}") from error
        self._check_addresses(addresses)
        failure: httpx.TransportError = httpx.ConnectError("the host has no address")
        for address in addresses:
            try:
                return transport.handle_request(pinned(request, address))
            except (httpx.ConnectError, httpx.ConnectTimeout) as error:
                failure = error
        raise failure

    def _check_form(self, url: httpx.URL) -> None:
        if url.scheme not in ("https", self._endpoint.scheme):
            raise _refused("does not use https")
        if url.userinfo not in (b"", self._endpoint.userinfo):
            raise _refused("contains a password")

    def _check_addresses(self, addresses: Sequence[str]) -> None:
        if not all(map(self._is_allowed, addresses)):
            raise _refused("is not public")

    def _proxy_of(self, url: httpx.URL) -> str | None:
        # A proxy cannot reach this machine's loopback interface.
        host = host_of(url)
        if host == host_of(self._endpoint) and any(map(_is_loopback, _addresses_in(host))):
            return None
        proxies = getproxies()
        proxy = proxies.get(url.scheme) or proxies.get("all")
        if not proxy or proxy_bypass(host):
            return None
        return proxy if "://" in proxy else f"http://{proxy}"


def _addresses_in(host: str) -> list[str]:
    """Return the address that a host spells, in any form that the system accepts, or nothing for a name."""
    if host.rstrip(".").rpartition(".")[2] == "localhost":
        return ["127.0.0.1"]
    try:
        found = socket.getaddrinfo(host, None, flags=socket.AI_NUMERICHOST)
    except (OSError, UnicodeError):
        return []
    return [str(address[0]) for *_, address in found]


def _is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address).is_loopback


def _is_private(address: str) -> bool:
    ip = ipaddress.ip_address(address)
    return ip not in _METADATA and any(ip in network for network in _PRIVATE)


def _refused(fault: str) -> AdapterRejected:
    return AdapterRejected("source_not_allowed", f"the hub redirects a download to an address that {fault}", "source")
