"""Lists the installed extensions, and reports those that would stop a server from starting."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from loramux.adapter_store.extensions import ExtensionKind, ExtensionRefused, distribution_of, unread_entries
from loramux.admin.doctor.findings import Finding, Grade
from loramux.admin.server.extensions import KINDS

CHECK = "extensions"


def check_extensions(kinds: Sequence[ExtensionKind[Any]] = KINDS) -> Iterator[Finding]:
    """Import every installed extension, and yield a finding for each."""
    num_found = 0
    for kind in kinds:
        for found in kind.try_all():
            num_found += 1
            if isinstance(found, ExtensionRefused):
                yield Finding(
                    check=CHECK,
                    grade=Grade.FAILED,
                    message=str(found),
                    mend="no server starts in this environment until this is done: see docs/extending.md",
                )
            else:
                yield Finding(check=CHECK, grade=Grade.OK, message=str(found))
    for entry in unread_entries(kinds):
        num_found += 1
        yield Finding(
            check=CHECK,
            grade=Grade.WARNING,
            message=f"{distribution_of(entry)} offers {entry.name!r} in the group {entry.group}, which is not read",
            mend=f"use one of {', '.join(kind.group for kind in kinds)}",
        )
    if not num_found:
        yield Finding(check=CHECK, grade=Grade.OK, message="no extensions are installed")
