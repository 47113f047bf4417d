"""The boto3 client, with connections that are shut down when their attempt's deadline passes.

boto3's timeouts apply to single socket operations. A server that sends one byte every four seconds never exceeds them,
so each attempt also has a timer that shuts its connections down.

botocore gives no public access to its connections: its events expose only the request before it is sent and the
response after its headers have arrived. This module therefore uses two private names, which no other code uses:

- `BaseClient._endpoint`, through which it reaches a client's HTTP session;
- `URLLib3Session._pool_classes_by_scheme`, from which the session creates its connections, including proxied ones.

`test_s3_connections.py` fails if botocore changes either name or its meaning.

obstore 0.12.1 cannot replace boto3: it cannot list or abort multipart uploads, or complete one with `If-None-Match`
(https://github.com/apache/arrow-rs-object-store/issues/289), so a conditional put would need the whole blob in memory.
Its signed URLs do not cover length, checksum or part number, and it sends no `Content-MD5`.
"""

from __future__ import annotations

import math
import os
import socket
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from contextvars import ContextVar
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

import boto3
from botocore.awsrequest import (
    AWSHTTPConnection,
    AWSHTTPConnectionPool,
    AWSHTTPSConnection,
    AWSHTTPSConnectionPool,
    AWSRequest,
)
from botocore.config import Config

from loramux.adapter_store.blobs.s3_limits import S3Limits

if TYPE_CHECKING:
    from mypy_boto3_s3 import S3Client

_MAX_CONNECTIONS = 64


def connect(limits: S3Limits) -> S3Client:
    has_endpoint = any(os.environ.get(name) for name in ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL"))
    client = boto3.client(
        "s3",
        config=Config(
            connect_timeout=limits.connect_s,
            read_timeout=limits.read_s,
            # boto3 does not retry: S3Calls does, with one budget and one breaker for all calls.
            retries={"mode": "standard", "total_max_attempts": 1},
            max_pool_connections=_MAX_CONNECTIONS,
            signature_version="s3v4",
            # Without a name, botocore builds a long one for each request.
            user_agent=f"loramux/{version('loramux')}",
            # Stores other than Amazon S3 rarely support a host name per bucket, and few support the newer Amazon
            # checksums: Ceph 16 ignores every x-amz-checksum-* header, and other stores refuse the trailers that carry
            # the checksums.
            s3={"addressing_style": "path" if has_endpoint else "auto"},
            request_checksum_calculation="when_required",
            response_checksum_validation="when_required",
        ),
    )
    private: Any = client
    private._endpoint.http_session._pool_classes_by_scheme.update(http=_HttpPool, https=_HttpsPool)
    return client


def put_presigned(client: S3Client, url: str, headers: Mapping[str, str], data: bytes) -> int:
    """Send a presigned PUT over the client's connections, with its certificates and proxies. Return the status."""
    private: Any = client
    return int(private._endpoint.http_session.send(AWSRequest("PUT", url, headers, data).prepare()).status_code)


class AttemptTimer:
    """Shuts down the connections that this thread uses in the `with` block once `seconds` have passed.

    The blocked call then fails as if the peer had closed the connection. A DNS lookup cannot be interrupted.
    """

    def __init__(self, seconds: float) -> None:
        self.due_s = time.monotonic() + seconds
        self._lock = threading.Lock()
        self._connections: list[Any] = []
        self._is_over = False
        self.has_fired = False

    def use(self, connection: Any) -> None:
        with self._lock:
            self._connections.append(connection)
            if self.has_fired:
                _shut_down(connection)

    def fire(self) -> None:
        with self._lock:
            if not self._is_over:
                self.has_fired = True
                for connection in self._connections:
                    _shut_down(connection)

    def __enter__(self) -> AttemptTimer:
        _current_timer.set(self)
        _watchdog.watch(self)
        return self

    def __exit__(self, *_: object) -> None:
        _current_timer.set(None)
        _watchdog.forget(self)
        with self._lock:
            # From here on, another attempt may be using the connections.
            self._is_over = True


class _Watchdog:
    """Fires the timers of all attempts from one thread. A thread for each would take a sixth of a call's CPU time."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._timers: set[AttemptTimer] = set()
        self._wakes_s = math.inf
        """When the thread looks at the timers again, on the monotonic clock."""
        self._thread: threading.Thread | None = None

    def watch(self, timer: AttemptTimer) -> None:
        with self._changed:
            self._timers.add(timer)
            if timer.due_s < self._wakes_s:
                self._wakes_s = timer.due_s
                self._changed.notify()
            # After a fork, the thread is missing.
            if self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(target=self._run, name="s3-timers", daemon=True)
                self._thread.start()

    def forget(self, timer: AttemptTimer) -> None:
        with self._changed:
            self._timers.discard(timer)

    def _run(self) -> None:
        while True:
            with self._changed:
                now_s = time.monotonic()
                due = {timer for timer in self._timers if timer.due_s <= now_s}
                self._timers -= due
                self._wakes_s = min((timer.due_s for timer in self._timers), default=math.inf)
                if not due:
                    self._changed.wait(None if math.isinf(self._wakes_s) else self._wakes_s - now_s)
            for timer in due:
                timer.fire()


_watchdog = _Watchdog()

_current_timer: ContextVar[AttemptTimer | None] = ContextVar("_current_timer", default=None)
"""The timer of this thread's current attempt, which boto3 cannot pass to the connections."""


def _shut_down(connection: Any) -> None:
    sock = connection.sock
    if sock is not None:
        # Do not close the socket: another thread is reading from it. SSLSocket.shutdown would make that thread read
        # the bytes without decrypting them.
        with suppress(OSError):
            socket.socket.shutdown(sock, socket.SHUT_RDWR)


class _Timed:
    """Registers each new or reused connection with the current attempt's timer."""

    def connect(self) -> None:
        super().connect()  # type: ignore[misc]
        self._tell()

    def request(self, *args: Any, **kwargs: Any) -> Any:
        self._tell()
        return super().request(*args, **kwargs)  # type: ignore[misc]

    def _tell(self) -> None:
        timer = _current_timer.get()
        if timer is not None:
            timer.use(self)


class _HttpConnection(_Timed, AWSHTTPConnection):  # type: ignore[misc]
    pass


class _HttpsConnection(_Timed, AWSHTTPSConnection):  # type: ignore[misc]
    pass


class _HttpPool(AWSHTTPConnectionPool):
    ConnectionCls = _HttpConnection


class _HttpsPool(AWSHTTPSConnectionPool):
    ConnectionCls = _HttpsConnection
