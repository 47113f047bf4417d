"""Tells SQLite that a condition is true for almost no rows, regardless of SQLite's statistics."""

from __future__ import annotations

from typing import Any

from sqlalchemy import ColumnElement
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.sql.compiler import SQLCompiler
from sqlalchemy.sql.functions import GenericFunction


# The function has no type. SQLAlchemy would compare a boolean function with 1, which would rule out an index.
class unlikely(GenericFunction[Any]):  # noqa: N801 - named like an SQL function
    """Marks a condition so that SQLite prefers its index: https://sqlite.org/lang_corefunc.html#likelihood"""

    inherit_cache = True

    def __init__(self, condition: ColumnElement[bool]) -> None:
        super().__init__(condition)


@compiles(unlikely)
def _plain(element: unlikely, compiler: SQLCompiler, **kw: Any) -> str:
    return compiler.process(element.clauses, **kw)


@compiles(unlikely, "sqlite")
def _likelihood(element: unlikely, compiler: SQLCompiler, **kw: Any) -> str:
    (condition,) = element.clauses
    return f"likelihood({compiler.process(condition, **kw)}, 0.0000001)"
