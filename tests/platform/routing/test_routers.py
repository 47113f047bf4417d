"""The promises of every router, including those of extensions. `test_router.py` tests the built-in one."""

from __future__ import annotations

import os
from random import Random

import pytest

from loramux.adapter_store.extensions import ExtensionRefused
from loramux.platform.routing.routers import HOMES, RequestRouter, new_router, router_names
from loramux.platform.routing.views import NoReplica
from tests.platform.routing.replica_views import Clock, ask, view

EXTENSION = os.environ.get("LORAMUX_TEST_ROUTER")
"""The name of an extension's router. It replaces the router of loramux."""

NAME = EXTENSION or HOMES


@pytest.fixture(params=[NAME], ids=[HOMES if EXTENSION is None else "extension"])
def router(request: pytest.FixtureRequest) -> RequestRouter:
    return new_router(request.param, clock=Clock(), random=Random(1))


def test_router_has_its_methods(router: RequestRouter) -> None:
    assert isinstance(router, RequestRouter)
    assert NAME in router_names()


def test_router_without_replicas_has_no_choice(router: RequestRouter) -> None:
    router.update([])
    for request in (ask("x"), ask(None)):
        with pytest.raises(NoReplica):
            router.choose(request)
    assert list(router.prefetches()) == []


def test_draining_replica_is_never_chosen(router: RequestRouter) -> None:
    router.update([view("a", is_draining=True, holds=["x"]), view("b", load=3.0)])
    assert {router.choose(ask(name)) for name in ("x", "y", None)} == {"b"}
    router.update([view("a", is_draining=True), view("b", is_draining=True)])
    with pytest.raises(NoReplica):
        router.choose(ask("x"))


def test_only_replica_is_chosen(router: RequestRouter) -> None:
    router.update([view("a", is_local=True, load=10.0, pages_free_fraction=0.0)])
    assert router.choose(ask("x", prefix=b"p")) == "a"


def test_random_operations_keep_to_the_last_update(router: RequestRouter) -> None:
    dice, ids, names = Random(2), [f"replica-{number}" for number in range(6)], [None, *"vwxyz"]
    running: list[tuple[str, str | None]] = []
    serving: set[str] = set()
    for step in range(600):
        if step % 20 == 0:
            views = [
                view(
                    one,
                    load=2 * dice.random(),
                    holds=dice.sample("vwxyz", 2),
                    is_draining=dice.random() < 0.2,
                    since_s=float(step),
                )
                for one in dice.sample(ids, dice.randint(1, 6))
            ]
            router.update(views)
            serving = {one.id for one in views if not one.is_draining}
            assert {prefetch.replica_id for prefetch in router.prefetches()} <= serving
        name = dice.choice(names)
        if not serving:
            with pytest.raises(NoReplica):
                router.choose(ask(name))
            continue
        chosen = router.choose(ask(name))
        assert chosen in serving
        # A request may also run on a replica that the router did not choose, and end after that replica is gone.
        running.append((dice.choice([chosen, *ids]), name))
        router.note_started(running[-1][0], ask(name))
        if len(running) > 20:
            replica_id, started = running.pop(dice.randrange(len(running)))
            router.note_ended(replica_id, ask(started))


def test_unknown_router_is_refused() -> None:
    with pytest.raises(ExtensionRefused, match="no installed distribution offers the router 'nearest'"):
        new_router("nearest", clock=Clock(), random=Random(1))
