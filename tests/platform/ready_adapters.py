from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence

from sqlalchemy import insert

from loramux.adapter_store.formats.version_files.adapter_task import AdapterTask
from loramux.adapter_store.formats.version_files.further_files import FurtherFiles, version_digest
from loramux.adapter_store.registry.aliases import change_alias
from loramux.adapter_store.registry.bases import note_validated
from loramux.adapter_store.registry.records import AliasTarget
from loramux.adapter_store.registry.version_files import replace_further_files
from loramux.migrations import schema
from loramux.migrations.database import Database
from loramux.migrations.identifiers import new_id


def add_ready_adapter(
    database: Database,
    tenant_id: str,
    name: str,
    digests: list[str],
    files: Mapping[str, bytes] | None = None,
    invocation_tokens: Sequence[int] = (),
    base_id: str | None = None,
    task: AdapterTask | None = None,
) -> str:
    """Add an adapter with a ready version per digest, and return its identifier. The last version is the default.

    `files` are the optional files of each version, by name; `invocation_tokens` activate each version. The
    versions are valid for `base_id`, and are for `task`.
    """
    further = FurtherFiles(files or {})
    adapter_id = new_id("ada")
    with database.write() as connection:
        connection.execute(insert(schema.adapters).values(id=adapter_id, tenant_id=tenant_id, name=name, created_us=0))
        for number, digest in enumerate(digests, 1):
            version_id = new_id("adv")
            connection.execute(
                insert(schema.adapter_versions).values(
                    id=version_id,
                    adapter_id=adapter_id,
                    number=number,
                    state="ready",
                    digest=digest,
                    version_digest=version_digest(digest, further.checksums) if files else None,
                    max_rank=8,
                    num_pages=1,
                    invocation_tokens=list(invocation_tokens) or None,
                    task=None if task is None else task.document(),
                    canonical_bytes=1,
                    upload_id=new_id("upl"),
                    report={},
                    created_us=0,
                    ready_us=0,
                )
            )
            replace_further_files(connection, version_id, further)
            if base_id is not None:
                note_validated(connection, version_id, base_id, now_us=0)
        default = [AliasTarget(version_id, len(digests), 100)]
        change_alias(connection, adapter_id, "default", default, "system", "set", 0)
    return adapter_id


def digest_of(name: str) -> str:
    return hashlib.sha256(name.encode()).hexdigest()
