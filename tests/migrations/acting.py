from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from loramux.migrations.audit import Actor, act_as


@contextmanager
def acting_as(actor: Actor) -> Iterator[None]:
    """Let an actor make the changes in the block, and the system those after it."""
    act_as(actor)
    try:
        yield
    finally:
        act_as(Actor())
