"""The services behind the routes of files and batches."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, cast

from fastapi import Depends, Request

from loramux.migrations.database import Database
from loramux.platform.batches.batch_rows import Batches
from loramux.platform.batches.tenant_files import Owner, TenantFiles
from loramux.platform.batches.transfers import Transfers
from loramux.platform.requests.authentication import Caller


@dataclass(frozen=True, slots=True)
class BatchServices:
    files: TenantFiles
    batches: Batches
    transfers: Transfers

    @staticmethod
    def over(database: Database, files: TenantFiles) -> BatchServices:
        return BatchServices(files, Batches(database, files), Transfers())


async def _services_of(request: Request) -> BatchServices:
    return cast(BatchServices, request.app.state.batches)


async def _owner(caller: Caller) -> Owner:
    return Owner.of(caller)


Kept = Annotated[BatchServices, Depends(_services_of)]
OwnerOfKey = Annotated[Owner, Depends(_owner)]
