"""A connection is closed when its request attempt ends, over HTTP, HTTPS or a proxy.

The tests also check the botocore internals that this depends on.
"""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import boto3
import pytest
from botocore.awsrequest import AWSHTTPConnectionPool, AWSHTTPSConnectionPool
from botocore.httpsession import URLLib3Session

from loramux.adapter_store.blobs.s3_blobs import S3BlobStore
from loramux.adapter_store.blobs.s3_connections import connect
from loramux.adapter_store.blobs.s3_limits import S3Limits
from loramux.adapter_store.errors import BlobStoreUnavailable
from tests.adapter_store.blobs.dripping_server import DrippingServer
from tests.adapter_store.blobs.limits import HURRIED

HALF_A_HEAD = b"HTTP/1.1 200 OK\r\nETag: "
HEAD = b"HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n\r\n"
MARGIN_S = 6.0
"""Extra time allowed for a busy machine, in seconds. The server drips for ten seconds."""


@pytest.fixture
def aws_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Set credentials and clear the machine's proxy, endpoint and certificate settings."""
    for name in ("AWS_ENDPOINT_URL_S3", "HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy"):
        monkeypatch.delenv(name, raising=False)
    for name in ("NO_PROXY", "no_proxy", "REQUESTS_CA_BUNDLE", "AWS_CA_BUNDLE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")


def test_botocore_pool_classes_are_where_expected(aws_environment: None) -> None:
    client: Any = boto3.client("s3")
    session = client._endpoint.http_session
    assert type(session) is URLLib3Session
    assert session._pool_classes_by_scheme == {"http": AWSHTTPConnectionPool, "https": AWSHTTPSConnectionPool}  # type: ignore[attr-defined]


def test_other_clients_keep_the_original_pool_classes(aws_environment: None) -> None:
    ours: Any = connect(S3Limits())
    other: Any = boto3.client("s3")
    pools = ours._endpoint.http_session._pool_classes_by_scheme
    others = other._endpoint.http_session._pool_classes_by_scheme
    assert pools.keys() == others.keys() == {"http", "https"}
    for scheme, pool in others.items():
        assert pools[scheme].ConnectionCls is not pool.ConnectionCls
        assert issubclass(pools[scheme].ConnectionCls, pool.ConnectionCls)


@pytest.mark.parametrize("way", ["http", "https", "proxy"])
@pytest.mark.parametrize("at_once", [HALF_A_HEAD, HEAD], ids=["in-the-head", "in-the-body"])
def test_slow_response_ends_at_the_deadline(
    aws_environment: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, way: str, at_once: bytes
) -> None:
    server = DrippingServer(at_once, tmp_path if way == "https" else None)
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://store.invalid" if way == "proxy" else server.url)
    if way == "proxy":
        monkeypatch.setenv("HTTP_PROXY", server.url)
    elif way == "https":
        monkeypatch.setenv("AWS_CA_BUNDLE", str(server.certificate))
    blobs = S3BlobStore("bucket", limits=replace(HURRIED, call_s=60.0, body_s=60.0))
    begin = time.monotonic()
    with pytest.raises(BlobStoreUnavailable, match="deadline exceeded"):
        blobs.get("k/one", tmp_path / "copy", deadline_s=0.4)
    assert time.monotonic() - begin < 0.4 + MARGIN_S
    server.stop()
