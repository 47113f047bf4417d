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
    versions, files = adapter_versions.c, adapter_version_files.c
    adds_tokens = exists().where(files.version_id == versions.id, files.name == VOCABULARY_FILE)
    query = select(versions.number, versions.invocation_tokens, versions.task, adds_tokens.label("adds_tokens"))
    for row in connection.execute(query.where(versions.id.in_(version_ids)).order_by(versions.number)):
        if row.invocation_tokens is not None:
            return f"version {row.number} is an activated adapter, which shares the base's cache already"
        if row.task is not None:
            return f"version {row.number} is not for generation"
        if row.adds_tokens:
            return f"version {row.number} adds tokens that the base does not have"
    return None
