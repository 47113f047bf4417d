"""The boto3 client, and connections that end when the attempt that uses them is out of time.

boto3's timeouts are for one operation on a socket. A server that sends a byte every four seconds never trips them, so
each attempt also has a timer that shuts its connections down.

botocore has no public way to its connections: its events hand out the request before it is sent and the answer once its
head is complete. So two of its private names are used, in `connect` alone:

- `BaseClient._endpoint`, the way from a client to its HTTP session;
- `URLLib3Session._pool_classes_by_scheme`, from which the session makes its connections, through proxies too.

`test_s3_connections.py` fails when botocore changes either, or what they mean.
"""

from __future__ import annotations

import os
import socket
import threading
from contextlib import suppress
from contextvars import ContextVar
from types import TracebackType
from typing import TYPE_CHECKING, Any

import boto3
from botocore.awsrequest import (
    AWSHTTPConnection,
    AWSHTTPConnectionPool,
    AWSHTTPSConnection,
    AWSHTTPSConnectionPool,
)
from botocore.config import Config

from loramux.adapter_store.blobs.s3_limits import S3Limits

if TYPE_CHECKING:
    from mypy_boto3_s3 import S3Client

_MAX_CONNECTIONS = 64


def connect(limits: S3Limits) -> S3Client:
    """A client whose credentials, region and endpoint come from where boto3 looks for them; nothing is sent yet."""
    has_endpoint = any(os.environ.get(name) for name in ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL"))
    client = boto3.client(
        "s3",
        config=Config(
            connect_timeout=limits.connect_s,
            read_timeout=limits.read_s,
            # Retries are ours: they share one budget and one breaker, which boto3's do not know.
            retries={"mode": "standard", "total_max_attempts": 1},
            max_pool_connections=_MAX_CONNECTIONS,
            signature_version="s3v4",
            # Stores other than Amazon's seldom have a host name for each bucket, and few know its new checksums:
            # Ceph 16 takes any x-amz-checksum-* unread, others refuse the trailers that carry them.
            s3={"addressing_style": "path" if has_endpoint else "auto"},
            request_checksum_calculation="when_required",
            response_checksum_validation="when_required",
        ),
    )
    private: Any = client
    private._endpoint.http_session._pool_classes_by_scheme.update(http=_HttpPool, https=_HttpsPool)
    return client


class AttemptTimer:
    """Shuts down the connections that the current thread uses inside its `with` block once `seconds` have passed.

    The blocked call then fails as if the peer had closed. Looking up a host name cannot be cut short.
    """

    def __init__(self, seconds: float) -> None:
        self._lock = threading.Lock()
        self._connections: list[Any] = []
        self._is_over = False
        self.has_fired = False
        self._timer = threading.Timer(max(0.0, seconds), self._fire)
        self._timer.daemon = True

    def use(self, connection: Any) -> None:
        with self._lock:
            self._connections.append(connection)
            if self.has_fired:
                _shut_down(connection)

    def __enter__(self) -> AttemptTimer:
        _current_timer.set(self)
        self._timer.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        _current_timer.set(None)
        self._timer.cancel()
        with self._lock:
            # The connections may be another attempt's from here on.
            self._is_over = True

    def _fire(self) -> None:
        with self._lock:
            if not self._is_over:
                self.has_fired = True
                for connection in self._connections:
                    _shut_down(connection)


_current_timer: ContextVar[AttemptTimer | None] = ContextVar("_current_timer", default=None)
"""The timer of the attempt that this thread makes: boto3 hands nothing through to its connections."""


def _shut_down(connection: Any) -> None:
    sock = connection.sock
    if sock is not None:
        # Not closed: another thread is reading from it. SSLSocket's own shutdown would turn that into plain reads.
        with suppress(OSError):
            socket.socket.shutdown(sock, socket.SHUT_RDWR)


class _Timed:
    """Tells the current attempt's timer of each connection that is made or used again."""

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
