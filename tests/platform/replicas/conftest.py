from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from loramux.platform.replicas import peer_connection, peer_listener, presence


@pytest.fixture
def anyio_backend() -> tuple[str, dict[str, Any]]:
    """The event loop of a server: its transports differ from asyncio's."""
    return "asyncio", {"use_uvloop": True}


@pytest.fixture(autouse=True)
def patient_servers() -> Iterator[None]:
    """Servers wait a minute for their database and for handshakes. By default, they go on without a late answer, and a
    test would not see what it expects.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(presence, "EXCHANGE_WAIT_S", 60.0)
        for module in (peer_connection, peer_listener):
            patch.setattr(module, "HANDSHAKE_TIMEOUT_S", 60.0)
        yield
