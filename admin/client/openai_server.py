"""Finds the OpenAI API that `loramux chat` and `loramux bench` call: options, then a profile, then the environment."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from loramux.admin.client.profiles import Profile, ProfileError, ProfileFile
from loramux.admin.client.server_address import PROFILE_VARIABLE, NoServerNamed, check_key, check_url

DEFAULT_URL = "http://127.0.0.1:8000/v1"
URL_VARIABLE, KEY_VARIABLE = "OPENAI_BASE_URL", "OPENAI_API_KEY"


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenAIServer:
    """An OpenAI API. The URL ends with the API's version, such as `/v1`, and has no slash at its end."""

    url: str
    key: str | None = field(repr=False)
    """None for servers that need no key."""

    @property
    def headers(self) -> dict[str, str]:
        return {} if self.key is None else {"authorization": f"Bearer {self.key}"}


def find_openai_server(
    url: str | None,
    key: str | None,
    profile: str | None,
    environment: Mapping[str, str] = os.environ,
    file: ProfileFile | None = None,
) -> OpenAIServer:
    """Return the server to call. Raises NoServerNamed.

    `url` and `key` come from the command line and replace OPENAI_BASE_URL and OPENAI_API_KEY. Without them, a profile
    named by `profile` or LORAMUX_PROFILE takes precedence over these variables, and they take precedence over the
    current profile. A profile's address and key are never mixed with those of the environment.
    """
    file = file or ProfileFile.of_user(environment)
    name = profile or environment.get(PROFILE_VARIABLE)
    given_url, given_key = (environment.get(variable, "").strip() for variable in (URL_VARIABLE, KEY_VARIABLE))
    try:
        if url is None and key is None and name:
            return _of_profile(file.read().find(name))
        if url or key or given_url or given_key:
            return _of_words(url or given_url, key or given_key)
        known = file.read()
        if known.current is not None:
            return _of_profile(known.find(known.current))
    except ProfileError as error:
        raise NoServerNamed(str(error)) from None
    raise NoServerNamed(
        f"set {URL_VARIABLE} and {KEY_VARIABLE} to the address of an OpenAI API, such as {DEFAULT_URL}, and a tenant's "
        "key: loramux keys create --tenant NAME"
    )


def _of_words(url: str, key: str) -> OpenAIServer:
    if not url:
        from loramux.platform.accounts.api_keys import OWN_PREFIX

        # A key of another provider is never sent to the port that a server of ours would use.
        if not key.startswith(OWN_PREFIX):
            raise NoServerNamed(f"{KEY_VARIABLE} is not a loramux key: set {URL_VARIABLE} to the server that it is for")
    return _checked(url or DEFAULT_URL, key, URL_VARIABLE)


def _of_profile(profile: Profile) -> OpenAIServer:
    if profile.openai_url is None:
        raise NoServerNamed(
            f"the profile {profile.name} has no address of an OpenAI API: set {URL_VARIABLE} and {KEY_VARIABLE}, or "
            f"save the profile again with 'loramux profiles add {profile.name} --openai-url {DEFAULT_URL}'"
        )
    return _checked(profile.openai_url, profile.openai_key or "", f"the profile {profile.name}'s openai_url")


def _checked(url: str, key: str, where: str) -> OpenAIServer:
    check_url(url, where)
    if key:
        check_key(key, KEY_VARIABLE)
    plain = url.rstrip("/")
    return OpenAIServer(url=plain if urlsplit(plain).path else f"{plain}/v1", key=key or None)
