"""The router that the settings of a server or gateway name."""

from __future__ import annotations

import time
from random import SystemRandom

from loramux.adapter_store.extensions import ExtensionRefused
from loramux.admin.errors import StartRefused
from loramux.platform.routing.routers import RequestRouter, new_router


def chosen_router(name: str) -> RequestRouter:
    """Create the router that the setting `router` names. Raises StartRefused if it cannot be used."""
    try:
        return new_router(name, clock=time.monotonic, random=SystemRandom())
    except ExtensionRefused as error:
        raise StartRefused(str(error)) from error
