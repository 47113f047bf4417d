"""Relying-party client for an OpenID provider (OpenID Connect Core 1.0, authorization code with PKCE)."""

from __future__ import annotations

import asyncio
import importlib
import ssl
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import httpx
from authlib.common.errors import AuthlibBaseError
from authlib.integrations.httpx_client import AsyncOAuth2Client
from authlib.oidc.core import CodeIDToken
from joserfc import jwt
from joserfc.errors import JoseError
from joserfc.jwk import KeySet

from loramux.admin.server.oidc_settings import OidcSettings, is_trusted_url

ALGORITHMS = ("RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "ES256", "ES384", "ES512", "EdDSA")
"""Accepted signature algorithms of ID tokens. `none` and shared secrets are excluded, so only the provider can sign."""

REQUIRED_ENDPOINTS = ("authorization_endpoint", "token_endpoint", "jwks_uri")
OPTIONAL_ENDPOINTS = ("userinfo_endpoint", "end_session_endpoint")
"""Endpoints that a provider may omit. They handle secrets or roles, so their URLs must pass the same checks."""

TIMEOUT_S = 5.0
METADATA_AGE_S = 3600.0
KEYS_AGE_S = 30.0
"""Minimum time between reads of the provider's keys, in seconds. A token that cannot be verified triggers a read."""
LEEWAY_S = 60

# Authlib uses httpx2 if it is installed, and httpx2 raises different errors from httpx.
_base = next(base for base in AsyncOAuth2Client.__mro__ if base.__name__ == "AsyncClient")
_transport: Any = importlib.import_module(_base.__module__.partition(".")[0])
_HTTP_ERRORS: tuple[type[Exception], ...] = (httpx.HTTPError, _transport.HTTPError)
_STATUS_ERRORS: tuple[type[Exception], ...] = (httpx.HTTPStatusError, _transport.HTTPStatusError)


class ProviderUnavailable(Exception):
    """The provider cannot be reached, or its metadata is invalid."""


class SignInRefused(Exception):
    """The provider's response does not prove the person's identity. The message is for the log."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """A sign-in in progress: the parameters for the provider, and the values that the provider must return."""

    state: str
    nonce: str
    code_verifier: str
    redirect_url: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """The person who signed in: the claims from the ID token and `userinfo`, and the tokens for later `userinfo` calls
    and for signing out.
    """

    claims: dict[str, Any]
    id_token: str
    access_token: str
    refresh_token: str | None


@dataclass(frozen=True, slots=True)
class Again:
    """A person's current claims from `userinfo`, and the tokens for the next `userinfo` request."""

    claims: dict[str, Any]
    access_token: str
    refresh_token: str | None


class OidcProvider:
    """One identity provider. Its metadata is cached for an hour."""

    def __init__(self, settings: OidcSettings, clock: Callable[[], float] = time.monotonic) -> None:
        self._settings = settings
        self._clock = clock
        self._lock = asyncio.Lock()
        self._metadata: dict[str, Any] | None = None
        self._metadata_s = 0.0
        self._keys: KeySet | None = None
        self._keys_s = 0.0

    async def authorization_url(self, attempt: Attempt) -> str:
        """Return the URL to send the browser to. Raises ProviderUnavailable."""
        metadata = await self._described()
        async with self._client(attempt.redirect_url) as client:
            url, _ = client.create_authorization_url(
                metadata["authorization_endpoint"],
                state=attempt.state,
                nonce=attempt.nonce,
                code_verifier=attempt.code_verifier,
            )
        return str(url)

    async def redeem(self, attempt: Attempt, code: str, issuer: str | None) -> Identity:
        """Redeem an authorization code. Raises SignInRefused or ProviderUnavailable.

        `issuer` is the callback's `iss` parameter, or None.
        """
        metadata = await self._described()
        if issuer is not None and issuer != self._settings.issuer:
            # RFC 9207: the code came from another provider.
            raise SignInRefused("the code is from another issuer")
        try:
            async with self._client(attempt.redirect_url) as client:
                token = await client.fetch_token(
                    metadata["token_endpoint"],
                    grant_type="authorization_code",
                    code=code,
                    code_verifier=attempt.code_verifier,
                )
                claims = await self._verified(str(token.get("id_token", "")), str(token["access_token"]), attempt.nonce)
                about = await self._about(client, metadata, str(claims["sub"]))
        except _HTTP_ERRORS as error:
            raise ProviderUnavailable(f"the provider does not answer: {type(error).__name__}") from error
        except (AuthlibBaseError, JoseError, ValueError, KeyError, TypeError, AttributeError) as error:
            # The provider's response is untrusted and can have any shape.
            raise SignInRefused(f"{type(error).__name__}: {getattr(error, 'error', '')}") from error
        return Identity(
            claims=about | claims,
            id_token=str(token["id_token"]),
            access_token=str(token["access_token"]),
            refresh_token=_text(token.get("refresh_token")),
        )

    async def ask_again(self, access_token: str, refresh_token: str | None, subject: str) -> Again:
        """Read a person's current claims from `userinfo`, with a new access token if the old one has expired.

        Raises ProviderUnavailable, or SignInRefused if the provider has no `userinfo` endpoint or no longer accepts the
        person's tokens.
        """
        metadata = await self._described()
        if metadata.get("userinfo_endpoint") is None:
            raise SignInRefused("the provider has no userinfo endpoint")
        try:
            async with self._client(None) as client:
                client.token = {"access_token": access_token, "token_type": "Bearer"}
                try:
                    about = await self._about(client, metadata, subject)
                except _STATUS_ERRORS as error:
                    if _status(error) not in (400, 401, 403) or refresh_token is None:
                        raise
                    token = await client.refresh_token(metadata["token_endpoint"], refresh_token=refresh_token)
                    access_token = str(token["access_token"])
                    refresh_token = _text(token.get("refresh_token")) or refresh_token
                    client.token = {"access_token": access_token, "token_type": "Bearer"}
                    about = await self._about(client, metadata, subject)
        except _STATUS_ERRORS as error:
            if _status(error) >= 500:
                raise ProviderUnavailable(f"the provider returned {_status(error)}") from error
            raise SignInRefused(f"userinfo returned {_status(error)}") from error
        except _HTTP_ERRORS as error:
            raise ProviderUnavailable(f"the provider does not answer: {type(error).__name__}") from error
        except (AuthlibBaseError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise SignInRefused(f"{type(error).__name__}: {getattr(error, 'error', '')}") from error
        return Again(about, access_token, refresh_token)

    async def sign_out_url(self, id_token: str) -> str | None:
        """The URL that also ends the browser's session at the provider, or None if the provider offers no such URL."""
        endpoint = (await self._described()).get("end_session_endpoint")
        if endpoint is None:
            return None
        params = {"id_token_hint": id_token, "client_id": self._settings.client_id}
        return str(httpx.URL(endpoint).copy_merge_params(params))

    async def _about(self, client: AsyncOAuth2Client, metadata: dict[str, Any], subject: str) -> dict[str, Any]:
        """The provider's claims about this person, in addition to those in the ID token."""
        if metadata.get("userinfo_endpoint") is None:
            return {}
        answer = await client.get(metadata["userinfo_endpoint"])
        answer.raise_for_status()
        about = answer.json()
        if about["sub"] != subject:
            raise SignInRefused("userinfo describes another person")
        return dict(about)

    async def _verified(self, id_token: str, access_token: str, nonce: str) -> dict[str, Any]:
        try:
            token = jwt.decode(id_token, await self._signing_keys(), algorithms=ALGORITHMS)
        except (JoseError, ValueError):
            # The provider may have rotated its keys.
            token = jwt.decode(id_token, await self._signing_keys(must_refresh=True), algorithms=ALGORITHMS)
        wanted = {
            "iss": {"essential": True, "value": self._settings.issuer},
            "aud": {"essential": True, "value": self._settings.client_id},
            "exp": {"essential": True},
            "sub": {"essential": True},
        }
        params = {"nonce": nonce, "client_id": self._settings.client_id, "access_token": access_token}
        claims = CodeIDToken(dict(token.claims), dict(token.header), wanted, params)
        claims.validate(now=int(time.time()), leeway=LEEWAY_S)
        return dict(claims)

    async def _described(self) -> dict[str, Any]:
        """The provider's metadata (OpenID Connect Discovery 1.0)."""
        async with self._lock:
            if self._metadata is None or self._clock() - self._metadata_s > METADATA_AGE_S:
                metadata = await _read(f"{self._settings.issuer.rstrip('/')}/.well-known/openid-configuration")
                if metadata.get("issuer") != self._settings.issuer:
                    raise ProviderUnavailable("the provider's issuer differs from the setting oidc_issuer")
                given = [name for name in OPTIONAL_ENDPOINTS if metadata.get(name) is not None]
                for name in (*REQUIRED_ENDPOINTS, *given):
                    if not is_trusted_url(str(metadata.get(name))):
                        raise ProviderUnavailable(f"the provider's {name} is not an https URL")
                self._metadata, self._metadata_s = metadata, self._clock()
            return self._metadata

    async def _signing_keys(self, *, must_refresh: bool = False) -> KeySet:
        metadata = await self._described()
        async with self._lock:
            is_stale = must_refresh and self._clock() - self._keys_s > KEYS_AGE_S
            if self._keys is None or is_stale:
                self._keys = KeySet.import_key_set(await _read(metadata["jwks_uri"]))  # type: ignore[arg-type]
                self._keys_s = self._clock()
            return self._keys

    def _client(self, redirect_url: str | None) -> AsyncOAuth2Client:
        return AsyncOAuth2Client(
            self._settings.client_id,
            self._settings.client_secret,
            scope=self._settings.scopes,
            redirect_uri=redirect_url,
            code_challenge_method="S256",
            token_endpoint_auth_method="none" if self._settings.client_secret is None else "client_secret_basic",
            timeout=TIMEOUT_S,
            trust_env=False,
            verify=_certificates(_transport),
        )


@cache
def _certificates(library: Any) -> ssl.SSLContext:
    """The trusted certificates of httpx or httpx2. Reading them takes 20 ms, in which the server answers nobody."""
    context: ssl.SSLContext = library.create_ssl_context(trust_env=False)
    return context


def _status(error: Any) -> int:
    return int(error.response.status_code)


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) and value else None


async def _read(url: str) -> dict[str, Any]:
    try:
        async with httpx.AsyncClient(timeout=TIMEOUT_S, trust_env=False, verify=_certificates(httpx)) as http:
            answer = await http.get(url)
            answer.raise_for_status()
            document = answer.json()
    except (httpx.HTTPError, ValueError) as error:
        raise ProviderUnavailable(f"the provider does not answer: {type(error).__name__}") from error
    if not isinstance(document, dict):
        raise ProviderUnavailable("the provider's answer is not a JSON object")
    return document
