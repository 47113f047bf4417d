from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import msgspec
import pytest

from loramux.adapter_store.errors import ValidationFailed
from loramux.adapter_store.sandbox.confinement import FILES, NETWORK
from loramux.adapter_store.validation import validator
from loramux.admin.errors import StartRefused
from loramux.admin.server.required_sandbox import require_sandbox
from loramux.admin.server.settings import Settings
from loramux.admin.serving import gateway
from loramux.engine.loop.config import EngineConfig
from loramux.platform.cluster.engine_replica import EngineReplica, ReplicaSettings

LACKING = "this machine's kernel or container has no landlock"


@pytest.fixture(autouse=True)
def _lacking(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(validator, "missing_measures", lambda: (NETWORK, FILES))


def test_gateway_refuses_to_start_without_a_required_sandbox(
    demo_base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("configure_logs", "load_extensions"):
        monkeypatch.setattr(gateway, name, lambda *_: None)
    settings = Settings(model=demo_base, data_dir=tmp_path, engine=(Path("/e"),), sandbox="required")
    with pytest.raises(StartRefused, match=LACKING):
        gateway.run(settings)


def test_sandbox_is_needed_only_if_it_is_required(demo_base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    require_sandbox(Settings(model=demo_base))
    monkeypatch.setattr(validator, "missing_measures", lambda: (NETWORK,))
    require_sandbox(Settings(model=demo_base, sandbox="required"))


def test_replica_refuses_to_start_without_a_required_sandbox(demo_base: Path, tmp_path: Path) -> None:
    engine = EngineConfig(
        model_dir=str(demo_base), blob_url="memory://", cache_dir=str(tmp_path), is_sandbox_required=True
    )
    settings = ReplicaSettings(engine=engine, start_timeout_s=1, step_timeout_s=1, is_on_loopback=False)

    async def start() -> None:
        initialize: Any = EngineReplica.__init__
        await initialize(EngineReplica.__new__(EngineReplica), msgspec.json.encode(settings).decode())

    with pytest.raises(ValidationFailed, match=LACKING):
        asyncio.run(start())
