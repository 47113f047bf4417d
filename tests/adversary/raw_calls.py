from __future__ import annotations

import asyncio
import json
import random
import re
from collections import Counter
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

import httpx

from tests.adversary.stand import ADAPTER, Stand

NUM_AT_ONCE = 32
ANSWER_S = 45.0
"""Time limit for one answer, in seconds. The server may keep the connection open for longer."""

VALUES: tuple[Any, ...] = (
    None,
    True,
    0,
    -1,
    2**31,
    2**63,
    10**30,
    1e308,
    5e-324,
    "",
    "\x00",
    "\ud800",
    "../../etc/passwd",
    "' OR 1=1 --",
    "{{7*7}}",
    "x" * 5000,
    "\u202e\u0665",
    [],
    [[]],
    {},
    {"a": {"a": {"a": 1}}},
)
BODIES: tuple[bytes, ...] = (
    b"",
    b"null",
    b"[]",
    b'"text"',
    b"{",
    b'{"model": "a", "model": "b"}',
    b'{"model": NaN}',
    b'\xef\xbb\xbf{"model": "a"}',
    b'{"model": "\xff"}',
    b'{"model": "\\ud800"}',
    b"[" * 20_000,
    b'{"a":' * 5_000,
    b'{"n": ' + b"9" * 5_000 + b"}",
    b'{"prompt": "' + b"a" * 3_000_000 + b'"}',
    b'{"messages": [' + b'{"role": "user", "content": "a"},' * 20_000 + b"{}]}",
)
PATHS = ("/", "//", "/%00", "/%2e%2e/%2e%2e/etc/passwd", "/v1/../admin", "/" + "a" * 70_000, "/console/..%2f", "*", "")
FIELDS = (
    *("model", "prompt", "messages", "max_tokens", "temperature", "top_p", "top_k", "min_p", "n", "seed", "stop"),
    *("logprobs", "logit_bias", "stream", "user", "slug", "name", "adapter_id", "metric", "limit", "burst", "mode"),
    *("scope", "scopes", "adapters", "files", "size", "sha256", "version", "weight", "percent", "tenant", "upload_id"),
)
MESSAGE_FIELDS = (
    *("model", "messages", "max_tokens", "system", "tools", "tool_choice", "thinking", "output_config", "metadata"),
    *("temperature", "top_p", "top_k", "stream", "cache_control", "context_management", "service_tier", "x"),
)
"""Fields of the Messages API, without stop strings."""


@dataclass(frozen=True, slots=True)
class Call:
    port: int
    data: bytes
    what: str


class RawCalls:
    def __init__(self, stand: Stand, dice: random.Random) -> None:
        self._stand = stand
        self._dice = dice
        attacker = stand.attacker
        wrong = ("", "sk-lmx-" + "0" * 60, "\xff\x01", "x" * 9000)
        self._keys = (attacker.key, attacker.reader_key, attacker.admin_key, *wrong)
        self._operations = [
            *_operations(stand.url, attacker.key),
            *_operations(stand.admin_url, attacker.admin_key),
        ]

    def draw(self) -> Call:
        kind = self._dice.choice((self._broken_head, self._broken_body, self._hostile_values, self._hostile_values))
        return kind()

    def _broken_head(self) -> Call:
        dice = self._dice
        port = dice.choice((self._stand.deployment.port, self._stand.deployment.admin_port))
        lines: dict[str, bytes] = {
            "unknown method": b"BREW / HTTP/1.1\r\nhost: x\r\n\r\n",
            "no version": b"GET /health/live\r\n\r\n",
            "version 9.9": b"GET /health/live HTTP/9.9\r\nhost: x\r\n\r\n",
            "binary": bytes(dice.randrange(256) for _ in range(400)),
            "TLS hello": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(300),
            "HTTP/2 preface": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
            "no host": b"GET /v1/models HTTP/1.1\r\n\r\n",
            "two lengths": b"POST /v1/completions HTTP/1.1\r\nhost: x\r\n"
            b"content-length: 2\r\ncontent-length: 9\r\n\r\n{}",
            "negative length": b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: -5\r\n\r\n{}",
            "length of 10**30": b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 1"
            + b"0" * 30
            + b"\r\n\r\n{}",
            "length and chunks": b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 2\r\n"
            b"transfer-encoding: chunked\r\n\r\n0\r\n\r\nGET /v1/models HTTP/1.1\r\nhost: x\r\n\r\n",
            "bad chunk": b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n{}\r\n",
            "a thousand headers": b"GET /v1/models HTTP/1.1\r\nhost: x\r\n" + b"a: b\r\n" * 1000 + b"\r\n",
            "a large header": b"GET /v1/models HTTP/1.1\r\nhost: x\r\na: " + b"b" * 200_000 + b"\r\n\r\n",
            "a NUL in a header": b"GET /v1/models HTTP/1.1\r\nhost: x\r\na: b\x00c\r\n\r\n",
            "a folded header": b"GET /v1/models HTTP/1.1\r\nhost: x\r\na: b\r\n c\r\n\r\n",
            "pipelined": b"GET /v1/models HTTP/1.1\r\nhost: x\r\n\r\n" * 50,
            "an upgrade": b"GET /v1/models HTTP/1.1\r\nhost: x\r\nconnection: upgrade\r\nupgrade: websocket\r\n"
            b"sec-websocket-key: dGhlIHNhbXBsZSBub25jZQ==\r\nsec-websocket-version: 13\r\n\r\n",
        }
        for path in PATHS:
            lines[f"path {path[:20]!r}"] = f"GET {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n".encode()
        what = dice.choice(sorted(lines))
        return Call(port, lines[what], what)

    def _broken_body(self) -> Call:
        port, method, path, _ = self._dice.choice([one for one in self._operations if one[1] != "get"])
        body = self._dice.choice(BODIES)
        return self._call(port, method, path, body, f"{method} {path} with {body[:20]!r}")

    def _hostile_values(self) -> Call:
        dice = self._dice
        port, method, path, parameters = dice.choice(self._operations)
        query = "&".join(
            f"{name}={quote(str(dice.choice(VALUES)), errors='replace')}" for name in parameters if dice.random() < 0.4
        )
        body = b""
        if method != "get":
            document = {name: dice.choice(VALUES) for name in dice.sample(FIELDS, 5)}
            if "completions" in path:
                # Send no stop strings, because an answer cut at a stop string is billed for fewer tokens than the
                # engine committed.
                changed = dice.choice([name for name in FIELDS if name != "stop"])
                document = {"model": ADAPTER, "prompt": "Hello", "max_tokens": 2, changed: dice.choice(VALUES)}
            elif "/v1/messages" in path:
                changed = dice.choice(MESSAGE_FIELDS)
                messages = [{"role": "user", "content": [{"type": "text", "text": "Hello"}]}]
                document = {"model": ADAPTER, "messages": messages, "max_tokens": 2, changed: dice.choice(VALUES)}
            body = json.dumps(document).encode()
        return self._call(port, method, f"{path}?{query}" if query else path, body, f"{method} {path}")

    def _call(self, port: int, method: str, path: str, body: bytes, what: str) -> Call:
        parts = path.split("{")
        filled = parts[0] + "".join(
            quote(str(self._dice.choice(VALUES))[:300] or "x", safe="", errors="replace") + part.partition("}")[2]
            for part in parts[1:]
        )
        head = (
            f"{method.upper()} {filled} HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-type: application/json\r\n"
            f"authorization: Bearer {self._dice.choice(self._keys)}\r\ncontent-length: {len(body)}\r\n"
            f"{'anthropic-version: 2026-10-21' if path.startswith('/v1/messages') else 'x: y'}\r\n\r\n"
        )
        return Call(port, head.encode("latin-1") + body, what)


async def attack(stand: Stand, dice: random.Random, num_calls: int) -> Counter[str]:
    """Send `num_calls` calls and count the responses by status. Record undocumented responses in the stand."""
    calls = RawCalls(stand, dice)
    statuses: Counter[str] = Counter()
    places = asyncio.Semaphore(NUM_AT_ONCE)
    secrets = [stand.polite.tenant_id.encode(), stand.polite.key[-43:].encode(), b"Traceback"]

    async def one(call: Call) -> None:
        async with places:
            answer = await send(call.port, call.data)
        status = answer[9:12].decode("latin-1") if answer else "closed"
        statuses[status] += 1
        if status.startswith("5") and not is_documented(answer):
            stand.undocumented[f"{status} {call.what}"] += 1
        if any(secret in answer for secret in secrets):
            stand.undocumented[f"leak {call.what}"] += 1

    await asyncio.gather(*(one(calls.draw()) for _ in range(num_calls)))
    return statuses


async def send(port: int, data: bytes) -> bytes:
    """Send raw bytes and return what the server sent until it closed the connection or fell silent, or the invented
    status 598 if it sent no whole response.
    """
    received = b""
    try:
        async with asyncio.timeout(ANSWER_S):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            try:
                writer.write(data)
                while len(received) < 1 << 20 and (more := await reader.read(65536)):
                    received += more
            finally:
                writer.transport.abort()
    except TimeoutError:
        if not is_whole(received):
            return b"HTTP/1.1 598 hung"
    except OSError:
        pass
    return received


def is_whole(answer: bytes) -> bool:
    """Return whether an answer begins with a response whose body has its declared length."""
    head, separator, body = answer.partition(b"\r\n\r\n")
    length = re.search(rb"\r\ncontent-length: (\d+)", head, re.IGNORECASE)
    return bool(separator) and length is not None and len(body) >= int(length[1])


def is_documented(answer: bytes) -> bool:
    """Return whether a response is a 503 with an error code or a 529 of the Messages API, with a Retry-After header."""
    head, _, body = answer.partition(b"\r\n\r\n")
    mark = {b"503": b'"code"', b"529": b'"overloaded_error"'}.get(answer[9:12])
    return mark is not None and mark in body and b"retry-after:" in head.lower()


def _operations(url: str, key: str) -> list[tuple[int, str, str, list[str]]]:
    headers = {"authorization": f"Bearer {key}"}
    document = httpx.get(f"{url}/openapi.json", headers=headers, trust_env=False, timeout=30).json()
    return [
        (
            int(url.rpartition(":")[2]),
            method,
            path,
            [one["name"] for one in operation.get("parameters", ()) if one["in"] == "query"],
        )
        for path, operations in sorted(document["paths"].items())
        for method, operation in sorted(operations.items())
        if method in {"get", "post", "put", "patch", "delete"}
    ]
