from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from loramux.adapter_store.pulling.pull_settings import PullSettings
from tests.adapter_store.hub.local_hub import LocalHub, running_hub
from tests.adapter_store.pulling.pulled import BASE, FILES, Pulls


@pytest.fixture
def hub() -> Iterator[LocalHub]:
    with running_hub() as hub:
        hub.has_resolve_cache = True
        hub.push(BASE, FILES)
        yield hub


@pytest.fixture
def pulls(hub: LocalHub, tmp_path: Path) -> Pulls:
    return Pulls(PullSettings(tmp_path / "models", hub.url))
