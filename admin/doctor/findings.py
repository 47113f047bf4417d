"""A check's result and how to fix it: one record for the doctor's own checks and for the server's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any


class Grade(StrEnum):
    """Whether something works; a warning means that it works for now."""

    OK = "ok"
    WARNING = "warning"
    FAILED = "failed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """The result of one check: `message` says what was found, `mend` what to do about it (None if nothing)."""

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
        """Raises KeyError or ValueError for a document that is not a finding."""
        return cls(
            check=str(document["check"]),
            grade=Grade(document["grade"]),
            message=str(document["message"]),
            mend=None if document["mend"] is None else str(document["mend"]),
        )


def is_healthy(findings: tuple[Finding, ...]) -> bool:
    """Whether nothing failed; warnings pass."""
    return all(finding.grade is not Grade.FAILED for finding in findings)
