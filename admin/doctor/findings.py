"""A check's result and how to fix a problem; the doctor's checks and the server's checks share this record."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any


class Grade(StrEnum):
    """Whether the checked part works; a warning means that the part still works."""

    OK = "ok"
    WARNING = "warning"
    FAILED = "failed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """The result of one check. `message` says what was found, and `mend` says what to do; None means nothing to do."""

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
        """Parse a finding. Raises KeyError or ValueError for a document that is not a finding."""
        return cls(
            check=str(document["check"]),
            grade=Grade(document["grade"]),
            message=str(document["message"]),
            mend=None if document["mend"] is None else str(document["mend"]),
        )


def is_healthy(findings: tuple[Finding, ...]) -> bool:
    """Whether no check failed; a warning is not a failure."""
    return all(finding.grade is not Grade.FAILED for finding in findings)
