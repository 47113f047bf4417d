"""The services behind the routes of files and batches."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, cast

from fastapi import Depends, Request

from loramux.migrations.database import Database
from loramux.platform.batches.batch_rows import Batches
from loramux.platform.batches.tenant_files import Owner, TenantFiles
from loramux.platform.errors import NotOnThisGateway
from loramux.platform.requests.authentication import Caller
from loramux.platform.tenant_slots import TenantSlots

MAX_TRANSFERS = 4
"""Maximum number of a tenant's uploads and downloads that one server handles at once, because each takes disk space."""


@dataclass(frozen=True, slots=True)
class BatchServices:
    files: TenantFiles
    batches: Batches
    transfers: TenantSlots

    @staticmethod
    def over(database: Database, files: TenantFiles) -> BatchServices:
        what = "files of this tenant are already being uploaded or downloaded"
        return BatchServices(files, Batches(database, files), TenantSlots(MAX_TRANSFERS, what, "too_many_transfers"))


async def _services_of(request: Request, caller: Caller) -> BatchServices:
    kept = cast(BatchServices | None, request.app.state.batches)
    if kept is None:
        raise NotOnThisGateway(
            "this gateway has no files and batches, because it has no blob_url: set it, or call the server's own port"
        )
    return kept


async def _owner(caller: Caller) -> Owner:
    return Owner.of(caller)


Kept = Annotated[BatchServices, Depends(_services_of)]
OwnerOfKey = Annotated[Owner, Depends(_owner)]
