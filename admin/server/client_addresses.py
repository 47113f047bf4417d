"""The address of the client that sent a call, and the proxies that are trusted to report it."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable
from functools import lru_cache
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network


class TrustedProxies:
    """The proxies whose `X-Forwarded-For` and `X-Forwarded-Proto` are trusted. By default there are none."""

    def __init__(self, networks: Iterable[str] = ()) -> None:
        """Accepts addresses and networks. Raises ValueError for any other string."""
        self._networks: tuple[IPv4Network | IPv6Network, ...] = tuple(map(ipaddress.ip_network, networks))

    def __bool__(self) -> bool:
        return bool(self._networks)

    def trusts(self, address: str) -> bool:
        parsed = _parse(address) if self._networks else None
        return parsed is not None and self._contains(parsed)

    def client_of(self, proxy: str, forwarded_for: str) -> str:
        """Return the client's address according to a trusted proxy's `X-Forwarded-For`.

        Each proxy appends the address that it was called from, so the rightmost entry that is not a trusted proxy is
        the client. The client can forge entries further left. A malformed entry ends the search at the proxy that
        forwarded it.
        """
        client = proxy
        for entry in reversed(forwarded_for.split(",")):
            address = _parse(_without_port(entry.strip()))
            if address is None:
                break
            client = str(address)
            if not self._contains(address):
                break
        return client

    def _contains(self, address: IPv4Address | IPv6Address) -> bool:
        return any(address in network for network in self._networks)


@lru_cache(maxsize=4096)
def origin_of(address: str) -> str:
    """The IPv4 address or IPv6 /64 under which a client is counted. A client usually has at least a /64."""
    parsed = _parse(address)
    if parsed is None:
        return address[:64]
    if isinstance(parsed, IPv6Address):
        return str(ipaddress.ip_network((parsed, 64), strict=False))
    return str(parsed)


def _parse(text: str) -> IPv4Address | IPv6Address | None:
    try:
        # A zone such as `%eth0` names an interface of this machine and can have any length.
        address = ipaddress.ip_address(text.partition("%")[0])
    except ValueError:
        return None
    # A listener on `::` sees IPv4 clients as `::ffff:192.0.2.1`.
    mapped = address.ipv4_mapped if isinstance(address, IPv6Address) else None
    return address if mapped is None else mapped


def _without_port(entry: str) -> str:
    """Strip the brackets and the port from `192.0.2.1:443` or `[2001:db8::1]:443`."""
    if entry.startswith("["):
        return entry[1:].partition("]")[0]
    return entry.partition(":")[0] if entry.count(":") == 1 else entry
