from __future__ import annotations

import base64
import http.server
import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import parse_qs

from joserfc import jwt
from joserfc.jwk import ECKey, OctKey


@dataclass
class FakeProvider:
    """`claims` override the claims of a valid ID token. `key` and `header` are used to sign it."""

    url: str = ""
    nonce: str = ""
    claims: dict[str, Any] = field(default_factory=dict)
    about: dict[str, Any] = field(default_factory=lambda: {"sub": "alice", "groups": ["ops"]})
    key: Any = None
    header: dict[str, Any] = field(default_factory=lambda: {"alg": "ES256", "kid": "one"})
    published: Any = field(default_factory=lambda: ECKey.generate_key("P-256", {"kid": "one"}))
    metadata: dict[str, Any] = field(default_factory=dict)
    received: list[dict[str, str]] = field(default_factory=list)
    access_token: str = "opaque"
    refresh_token: str | None = None
    refused_tokens: set[str] = field(default_factory=set)
    """Access tokens that have expired."""
    is_broken: bool = False
    num_asked: int = 0
    """Number of user information requests and failed token requests."""

    moved: str = ""
    """A path that redirects to `/elsewhere`."""
    num_followed: int = 0
    """Number of calls of `/elsewhere`."""

    def status(self, path: str, authorization: str) -> int:
        self.num_followed += path == "/elsewhere"
        if path == self.moved:
            return 307
        if self.is_broken and path in ("/userinfo_endpoint", "/token_endpoint"):
            self.num_asked += 1
            return 502
        if path == "/userinfo_endpoint":
            self.num_asked += 1
            if authorization.removeprefix("Bearer ") in self.refused_tokens:
                return 401
        return 200

    def answer(self, path: str, body: str) -> Any:
        match path:
            case "/.well-known/openid-configuration":
                endpoints = {name: f"{self.url}/{name}" for name in ("token_endpoint", "userinfo_endpoint", "jwks_uri")}
                described = {
                    "issuer": self.url,
                    "authorization_endpoint": f"{self.url}/authorize",
                    "end_session_endpoint": f"{self.url}/end",
                    **endpoints,
                    **self.metadata,
                }
                return {name: value for name, value in described.items() if value is not None}
            case "/jwks_uri":
                return {"keys": [self.published.as_dict(private=False)]}
            case "/token_endpoint":
                self.received.append({name: values[0] for name, values in parse_qs(body).items()})
                made = {"access_token": self.access_token, "token_type": "bearer", "id_token": self.id_token()}
                return made if self.refresh_token is None else {**made, "refresh_token": self.refresh_token}
            case "/userinfo_endpoint":
                return self.about
        return None

    def id_token(self) -> str:
        now = int(time.time())
        claims = {
            "iss": self.url,
            "sub": "alice",
            "aud": "loramux",
            "exp": now + 300,
            "iat": now,
            "nonce": self.nonce,
            **self.claims,
        }
        claims = {name: value for name, value in claims.items() if value is not None}
        if self.header["alg"] == "none":
            return ".".join(_base64(json.dumps(part)) for part in (self.header, claims)) + "."
        return jwt.encode(self.header, claims, self.key or self.published, algorithms=["ES256", "HS256"])


def _base64(text: str) -> str:
    return base64.urlsafe_b64encode(text.encode()).decode().rstrip("=")


def shared_secret() -> Any:
    return OctKey.import_key("a-client-secret-of-some-length-and-more")


@contextmanager
def fake_provider() -> Iterator[FakeProvider]:
    made = FakeProvider()

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            length = int(self.headers.get("content-length") or 0)
            answer = made.answer(self.path, self.rfile.read(length).decode())
            status = made.status(self.path, self.headers.get("authorization", ""))
            self.send_response(status if answer is not None else 404)
            self.send_header("content-type", "application/json")
            if status == 307:
                self.send_header("location", f"{made.url}/elsewhere")
            self.end_headers()
            self.wfile.write(json.dumps({} if status == 307 else answer).encode())

        def do_POST(self) -> None:
            self.do_GET()

        def log_message(self, *arguments: Any) -> None:
            return

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        made.url = f"http://127.0.0.1:{server.server_port}"
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        yield made
        server.shutdown()
        thread.join()
