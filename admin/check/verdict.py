"""The result of checking a base or an adapter: whether it would be served, the problems, warnings and facts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from loramux.adapter_store.errors import Refused
from loramux.adapter_store.validation.report import Warn


@dataclass(frozen=True, slots=True)
class Problem:
    """A reason for not serving a base or an adapter. `param` is the file, configuration key or tensor at fault."""

    code: str
    message: str
    param: str | None

    @classmethod
    def of(cls, error: Refused) -> Problem:
        return cls(error.code, error.message, error.param)

    def document(self) -> dict[str, Any]:
        return {"code": self.code, "message": self.message, "param": self.param}


@dataclass(frozen=True, slots=True)
class CheckVerdict:
    """The result of checking `path`. `kind` is `base` or `adapter`, and `facts` are JSON values."""

    kind: str
    path: str
    facts: Mapping[str, Any] = field(default_factory=dict)
    problems: tuple[Problem, ...] = ()
    warnings: tuple[Warn, ...] = ()

    @property
    def is_served(self) -> bool:
        return not self.problems

    def document(self) -> dict[str, Any]:
        return {
            "object": "check",
            "kind": self.kind,
            "path": self.path,
            "served": self.is_served,
            "problems": [problem.document() for problem in self.problems],
            "warnings": [warning.document() for warning in self.warnings],
            "facts": dict(self.facts),
        }
