from __future__ import annotations

from typing import Any

import pytest


@pytest.fixture
def anyio_backend() -> tuple[str, dict[str, Any]]:
    """The event loop of a server: its transports differ from asyncio's."""
    return "asyncio", {"use_uvloop": True}
