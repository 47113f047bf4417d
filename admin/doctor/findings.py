"""The result of a check and how to fix the problem, used by the doctor and by the server's self-check."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any


class Grade(StrEnum):
    """A warning means that the component still works."""

    OK = "ok"
    WARNING = "warning"
    FAILED = "failed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """The result of one check. `message` describes the finding. `mend` says how to fix the problem, or is None."""

    check: str
    grade: Grade
    message: str
    mend: str | None = None

    def document(self) -> dict[str, Any]:
        return {
            "object": "finding",
            "check": self.check,
            "grade": self.grade.value,
            "message": self.message,
            "mend": self.mend,
        }

    @classmethod
    def from_document(cls, document: Mapping[str, Any]) -> Finding:
        return cls(
            check=str(document["check"]),
            grade=Grade(document["grade"]),
            message=str(document["message"]),
            mend=None if document["mend"] is None else str(document["mend"]),
        )


def is_healthy(findings: tuple[Finding, ...]) -> bool:
    """Return whether no check failed. A warning is not a failure."""
    return all(finding.grade is not Grade.FAILED for finding in findings)
