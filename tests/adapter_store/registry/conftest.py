from __future__ import annotations

import pytest

from loramux.adapter_store.ingest.claims import VersionClaims
from loramux.adapter_store.ingest.upload_rows import UploadRows
from loramux.migrations.database import Database
from tests.adapter_store.registry.bare_versions import Versions


@pytest.fixture
def versions(database: Database) -> Versions:
    return Versions(UploadRows(database), VersionClaims(database))
