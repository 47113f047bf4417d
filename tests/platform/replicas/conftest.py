from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from loramux.platform.replicas import presence


@pytest.fixture
def anyio_backend() -> tuple[str, dict[str, Any]]:
    """The event loop of a server: its transports differ from asyncio's."""
    return "asyncio", {"use_uvloop": True}


@pytest.fixture(autouse=True)
def patient_beats() -> Iterator[None]:
    """A beat whose database answers late keeps what it knows, and a test would not see what it expects."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(presence, "EXCHANGE_WAIT_S", 60.0)
        yield
