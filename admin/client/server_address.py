"""Finds the server and the key for a command: `--profile`, then the environment, then the current profile."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from urllib.parse import urlsplit

import httpx

from loramux.admin.client.profiles import Profile, ProfileError, ProfileFile

DEFAULT_URL = "http://127.0.0.1:8001"
URL_VARIABLE, KEY_VARIABLE, PROFILE_VARIABLE = "LORAMUX_ADMIN_URL", "LORAMUX_ADMIN_KEY", "LORAMUX_PROFILE"


class NoServerNamed(Exception):
    """No usable server address or key is configured. The message says what to set."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerAddress:
    url: str
    key: str = field(repr=False)
    source: str


def find_server(
    profile: str | None, environment: Mapping[str, str] = os.environ, file: ProfileFile | None = None
) -> ServerAddress:
    """Return the server to call. Raises NoServerNamed.

    The profile in `profile` or LORAMUX_PROFILE takes precedence over LORAMUX_ADMIN_URL and LORAMUX_ADMIN_KEY, and these
    variables take precedence over the current profile. The address and the key always come from the same source, so
    that a key is sent only to its own server.
    """
    file = file or ProfileFile.of_user(environment)
    name = profile or environment.get(PROFILE_VARIABLE)
    try:
        if name:
            return _of_profile(file.read().find(name))
        # A variable set from a file often ends with a line break.
        key, url = (environment.get(variable, "").strip() for variable in (KEY_VARIABLE, URL_VARIABLE))
        if key:
            return _checked(ServerAddress(url=url or DEFAULT_URL, key=key, source="the environment"), URL_VARIABLE)
        if url:
            raise NoServerNamed(
                f"{URL_VARIABLE} is set and {KEY_VARIABLE} is not: set both, or neither to use a profile"
            )
        known = file.read()
        if known.current is None:
            use = "choose a profile: loramux profiles use NAME" if known.profiles else "loramux profiles add NAME"
            raise NoServerNamed(f"set {KEY_VARIABLE} to an administrator's key, or {use}")
        return _of_profile(known.find(known.current))
    except ProfileError as error:
        raise NoServerNamed(str(error)) from None


def check_url(url: str, where: str) -> None:
    """Raise NoServerNamed unless the URL can be an admin listener's address."""
    try:
        parts = urlsplit(url)
        if parts.scheme in ("http", "https") and parts.hostname and parts.port != 0:
            httpx.URL(url)
            return
    except (httpx.InvalidURL, ValueError):
        # The port or the address is invalid.
        pass
    raise NoServerNamed(f"{where} is {url!r}: it should look like {DEFAULT_URL}")


def check_key(key: str, where: str) -> None:
    """Raise NoServerNamed for a key that cannot be sent in a header. The message never shows the key."""
    if not (key and key.isascii() and key.isprintable()):
        raise NoServerNamed(f"{where} is not a key: a key has only printable ASCII characters")


def _of_profile(profile: Profile) -> ServerAddress:
    where = f"the profile {profile.name}"
    return _checked(ServerAddress(url=profile.url, key=profile.key, source=where), f"{where}'s url")


def _checked(address: ServerAddress, url_name: str) -> ServerAddress:
    key_name = KEY_VARIABLE if url_name == URL_VARIABLE else f"the key of {address.source}"
    check_key(address.key, key_name)
    check_url(address.url, url_name)
    return address
