"""SQL statements that are compiled once for all databases of a test process.

A server has one database and compiles a statement once. Thousands of tests open a database each and would compile every
statement again, which takes longer than running it.
"""

from __future__ import annotations

from typing import Any

from sqlalchemy import Connection, Engine, event
from sqlalchemy.util import LRUCache

MAX_STATEMENTS = 2000


class _Compiled(LRUCache[Any, Any]):
    """Compiled statements. Databases of the same kind share them, because the key has the dialect's name in place of
    the dialect of one engine.
    """

    def get(self, key: Any, default: Any = None) -> Any:
        return super().get(_shared(key), default)

    def __setitem__(self, key: Any, value: Any) -> None:
        super().__setitem__(_shared(key), value)


def _shared(key: tuple[Any, ...]) -> tuple[Any, ...]:
    dialect, *statement = key
    return (dialect.name, dialect.driver, *statement)


def share_compiled_statements() -> None:
    """Make all engines of this process use one cache, also those that are created later."""
    compiled = _Compiled(MAX_STATEMENTS)

    @event.listens_for(Engine, "engine_connect")
    def use(connection: Connection) -> None:
        connection.execution_options(compiled_cache=compiled)
