"""Which versions can leave the beginnings of prompts to the base: see `Alias.share_base_cache`."""

from __future__ import annotations

from collections.abc import Sequence

from sqlalchemy import Connection, exists, select

from loramux.adapter_store.formats.files.file_names import VOCABULARY_FILE
from loramux.migrations.schema import adapter_version_files, adapter_versions

PARAM = "share_base_cache"
CODE = "invalid_share_base_cache"
MAX_SHARE_BASE_CACHE = 1_000_000


def why_not_shared(connection: Connection, version_ids: Sequence[str]) -> str | None:
    """Return why one of these versions cannot share, or None if all can."""
    return next(iter(not_sharing(connection, version_ids).values()), None)


def not_sharing(connection: Connection, version_ids: Sequence[str]) -> dict[int, str]:
    """Return the numbers of those of these versions that cannot share, and why."""
    versions, files = adapter_versions.c, adapter_version_files.c
    adds_tokens = exists().where(files.version_id == versions.id, files.name == VOCABULARY_FILE)
    query = select(versions.number, versions.invocation_tokens, versions.task, adds_tokens.label("adds_tokens"))
    reasons: dict[int, str] = {}
    for row in connection.execute(query.where(versions.id.in_(version_ids)).order_by(versions.number)):
        if row.invocation_tokens is not None:
            reasons[row.number] = f"version {row.number} is an activated adapter, which shares the base's cache already"
        elif row.task is not None:
            reasons[row.number] = f"version {row.number} is not for generation"
        elif row.adds_tokens:
            reasons[row.number] = f"version {row.number} adds tokens that the base does not have"
    return reasons
