"""Pins on several servers of one database."""

from __future__ import annotations

from dataclasses import replace

import pytest

from loramux.admin.serving.upkeep import Upkeep
from loramux.engine.protocol.messages import Pin
from loramux.platform.replicas.engine_group import EngineGroup
from tests.admin.admin_side import AdminSide
from tests.admin.rest.adapters.ready_versions import add_ready_versions
from tests.platform.scripted_engine import ScriptedEngine

pytestmark = pytest.mark.anyio

DIGEST = "1" * 64


async def test_an_unpinned_version_loses_its_pins_on_every_server(admin_side: AdminSide) -> None:
    services, engines = admin_side.services, (admin_side.engine, ScriptedEngine())
    upkeeps = [Upkeep(replace(services, engine=replace(services.engine, client=engine))) for engine in engines]
    tenant = services.accounts.tenants.create("acme")
    adapter = services.adapters.registry.create_adapter(tenant.id, "support")
    add_ready_versions(services.database, adapter.id, 1)

    async def look() -> list[set[str]]:
        for upkeep in upkeeps:
            await upkeep.renew_pins()
        return [engine.pinned for engine in engines]

    services.adapters.pins.set_pinned(adapter.id, 1, True)
    assert await look() == [{DIGEST}, {DIGEST}]
    services.adapters.pins.set_pinned(adapter.id, 1, False)
    await engines[0].call(Pin(digest=DIGEST, is_pinned=False), 1.0)
    await look()
    assert await look() == [set(), set()]
    assert DIGEST in engines[1].resident, "the adapter stays until its pages are needed"


async def test_a_pin_that_only_one_of_several_engines_has_ends(admin_side: AdminSide) -> None:
    services, engines = admin_side.services, {"first": ScriptedEngine(), "second": ScriptedEngine()}
    group = EngineGroup("no engine is ready")
    group.show(engines, None)
    upkeep = Upkeep(replace(services, engine=replace(services.engine, client=group)))
    await engines["second"].call(Pin(digest=DIGEST), 1.0)
    for _ in range(2):
        await upkeep.renew_pins()
    assert engines["second"].pinned == set()


async def test_looks_before_and_after_a_failed_one_are_not_in_a_row(admin_side: AdminSide) -> None:
    engine, upkeep = admin_side.engine, Upkeep(admin_side.services)
    await engine.call(Pin(digest=DIGEST), 1.0)
    await upkeep.renew_pins()
    engine.die()
    await upkeep.renew_pins()
    engine.revive()
    await upkeep.renew_pins()
    assert engine.pinned == {DIGEST}
    await upkeep.renew_pins()
    assert engine.pinned == set()


async def test_an_adapter_that_is_being_pinned_keeps_its_pin(admin_side: AdminSide) -> None:
    """The call pins the adapter in the engine before it stores the pin."""
    services, engine = admin_side.services, admin_side.engine
    tenant = services.accounts.tenants.create("acme")
    adapter = services.adapters.registry.create_adapter(tenant.id, "support")
    add_ready_versions(services.database, adapter.id, 1)
    upkeep = Upkeep(services)
    await engine.call(Pin(digest=DIGEST), 1.0)
    await upkeep.renew_pins()
    services.adapters.pins.set_pinned(adapter.id, 1, True)
    for _ in range(2):
        await upkeep.renew_pins()
    assert engine.pinned == {DIGEST}
