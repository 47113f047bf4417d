from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from loramux.platform.cluster.cluster_link import ClusterLink, LinkTarget
from loramux.platform.cluster.ray_connection import ClusterUnavailable
from loramux.platform.cluster.replica_calls import CallFailed, ListedReplica
from tests.platform.replicas.lab import until

pytestmark = pytest.mark.anyio


def target(**environment: str) -> LinkTarget:
    return LinkTarget(address="127.0.0.1:1", app="loramux", environment=environment)


def command(case: str) -> tuple[str, ...]:
    return sys.executable, str(Path(__file__).with_name("link_without_ray.py")), case


def values(replica: ListedReplica) -> Mapping[str, object]:
    return replica.state


async def test_calls_pass_through_the_link_process() -> None:
    link = ClusterLink(lambda: target(), command("echo"))
    seen: list[tuple[ListedReplica, ...]] = []
    await link.start()
    link.watch(seen.append)
    await until(lambda: bool(seen[-1]))
    assert [(one.id, values(one)) for one in seen[-1]] == [("only", {"holds": b"\0\1"})]
    stream = link.session("only", "one")
    first = asyncio.ensure_future(anext(stream))
    await link.send("only", "one", 0, b"a" * 70_000)
    assert await first == b"a" * 70_000
    link.keep(frozenset({"only"}))
    await link.send("only", "one", 70_000, b"kept?")
    assert await anext(stream) == b"only"
    await stream.aclose()
    with pytest.raises(CallFailed, match="ReplicaGone: the cluster has no replica gone"):
        await link.send("gone", "one", 0, b"")
    with pytest.raises(CallFailed, match="ReplicaGone"):
        await anext(link.session("gone", "two"))
    await link.close()


async def test_a_link_process_that_dies_ends_its_calls_and_is_replaced() -> None:
    link = ClusterLink(lambda: target(), command("echo"))
    seen: list[tuple[ListedReplica, ...]] = []
    await link.start()
    link.watch(seen.append)
    await until(lambda: bool(seen[-1]))
    stream = link.session("only", "one")
    reading = asyncio.ensure_future(anext(stream))
    await link.send("only", "one", 0, b"a")
    await reading
    reading = asyncio.ensure_future(anext(stream))
    with pytest.raises(CallFailed, match="cannot be reached"):
        await link.send("only", "one", 1, b"die")
    with pytest.raises(CallFailed, match="cannot be reached"):
        await reading
    assert seen[-1] == ()
    assert link.trouble == "the cluster cannot be reached any more; trying again"
    with pytest.raises(CallFailed):
        await link.send("only", "one", 1, b"a")
    await until(lambda: bool(seen[-1]))
    assert link.trouble is None
    await link.close()


async def test_a_cluster_that_cannot_be_joined_is_reported() -> None:
    with pytest.raises(ClusterUnavailable, match=r"^no cluster here$"):
        await ClusterLink(lambda: target(), command("refuse")).start()
    with pytest.raises(ClusterUnavailable, match=r"^the cluster at 127\.0\.0\.1:1 does not answer$"):
        await ClusterLink(lambda: target(), (sys.executable, "-c", "")).start()


async def test_secrets_of_the_server_do_not_reach_the_link_process(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("LORAMUX_ADMIN_KEY", "PGPASSWORD", "AWS_SECRET_ACCESS_KEY")
    for name in names:
        monkeypatch.setenv(name, "secret")
    seen = " ".join(f"{name}=None" for name in names)
    with pytest.raises(ClusterUnavailable, match=f"^{seen} RAY_AUTH_MODE=token$"):
        await ClusterLink(lambda: target(RAY_AUTH_MODE="token"), command("environment")).start()
    assert os.environ["LORAMUX_ADMIN_KEY"] == "secret"
