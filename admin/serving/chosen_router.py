"""The router that the settings of a server or gateway name."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from random import SystemRandom

from loramux.adapter_store.extensions import ExtensionRefused
from loramux.admin.errors import StartRefused
from loramux.platform.routing.routers import RequestRouter, new_router


def router_factory(name: str) -> Callable[[], RequestRouter]:
    """Return a factory of the router that the setting `router` names. Raises StartRefused if it cannot be used."""
    factory = partial(new_router, name, clock=time.monotonic, random=SystemRandom())
    try:
        # Each base gets a router of its own later, when nothing can be refused any more.
        factory()
    except ExtensionRefused as error:
        raise StartRefused(str(error)) from error
    return factory
