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
    """A beat whose database answers late keeps what it knows, and a connection that is late is refused."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(presence, "EXCHANGE_WAIT_S", 60.0)
        for module in (peer_connection, peer_listener):
            patch.setattr(module, "HANDSHAKE_TIMEOUT_S", 60.0)
        yield
