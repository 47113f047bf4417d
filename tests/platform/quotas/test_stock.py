from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from loramux.adapter_store.formats.files.file_names import CONFIG_FILE, GENERATION_FILE, TEMPLATE_FILE, TENSORS_FILE
from loramux.adapter_store.formats.version_files.further_files import FurtherFiles
from loramux.adapter_store.ingest.claims import Verdict, VersionClaims
from loramux.adapter_store.ingest.upload_rows import UploadRows
from loramux.adapter_store.registry.records import Upload, UploadFile
from loramux.adapter_store.registry.registry import AdapterRegistry
from loramux.migrations.database import Database
from loramux.platform.accounts.tenants import Tenant
from loramux.platform.quotas.decisions import QuotaExceeded
from loramux.platform.quotas.overview import QuotaCaller, QuotaOverview
from loramux.platform.quotas.policies import QuotaPolicies
from loramux.platform.quotas.stock import StockLimits

METRIC = "adapter_bytes"
HOUR_US = 3_600_000_000


class Shelf:
    def __init__(self, database: Database, tenant: Tenant) -> None:
        limits = StockLimits()
        registry = AdapterRegistry(database, limits=limits)
        self.database = database
        self.tenant = tenant
        self.intake = UploadRows(database, limits)
        self.adapter_ids = [registry.create_adapter(tenant.id, name).id for name in ("support", "sales")]

    def declare(self, size: int, number: int = 0, lifetime_us: int = HOUR_US) -> Upload:
        files = [UploadFile(CONFIG_FILE, 1, f"{size:064d}"), UploadFile(TENSORS_FILE, size - 1, f"{size:064d}")]
        return self.intake.open_upload(self.adapter_ids[number % 2], files, lifetime_us)

    def limit(self, limit: int, mode: str = "hard") -> None:
        QuotaPolicies(self.database).set(self.tenant.id, METRIC, limit, mode=mode)

    @property
    def standing(self) -> tuple[int, int, int, int]:
        """Return the used, reserved and remaining amounts of the limit, and how often a soft limit was exceeded."""
        (limit,) = QuotaOverview(self.database).effective(QuotaCaller(tenant_id=self.tenant.id))
        return limit.used, limit.reserved, limit.remaining, limit.num_exceeded


@pytest.fixture
def shelf(clocked: Database, acme: Tenant) -> Shelf:
    return Shelf(clocked, acme)


def test_open_uploads_count(shelf: Shelf) -> None:
    shelf.limit(1000)
    for number in range(2):
        shelf.declare(500, number)
    with pytest.raises(QuotaExceeded) as refused:
        shelf.declare(2_000_000)
    assert (refused.value.code, refused.value.param) == ("insufficient_quota", METRIC)
    with pytest.raises(QuotaExceeded) as refused:
        shelf.declare(2)
    assert refused.value.retry_after_s == 1, "open uploads may return bytes at any time"
    assert shelf.standing == (0, 1000, 0, 0)


def test_an_upload_counts_once_on_its_way_to_a_version(shelf: Shelf) -> None:
    shelf.limit(1000)
    upload = shelf.declare(1000)
    version = shelf.intake.add_version(upload.adapter_id, upload.id).version
    assert shelf.standing == (1000, 0, 0, 0)
    claims = VersionClaims(shelf.database)
    assert claims.claim_version(version.id) is not None
    claims.reject(version.id, {})
    assert shelf.standing == (0, 0, 1000, 0)
    upload = shelf.declare(999)
    version = shelf.intake.add_version(upload.adapter_id, upload.id).version
    assert claims.claim_version(version.id) is not None
    claims.accept(version, Verdict("a" * 64, 8, 3, 700, {}))
    assert shelf.standing == (999, 0, 1, 0), "its blobs are being stored"
    claims.publish(version)
    assert shelf.standing == (700, 0, 300, 0)


def test_optional_files_of_a_version_count(shelf: Shelf) -> None:
    shelf.limit(1000)
    upload = shelf.declare(999)
    version = shelf.intake.add_version(upload.adapter_id, upload.id).version
    claims = VersionClaims(shelf.database)
    assert claims.claim_version(version.id) is not None
    files = FurtherFiles({TEMPLATE_FILE: b"x" * 40, GENERATION_FILE: b"{}"})
    claims.accept(version, Verdict("a" * 64, 8, 3, 700, {}, files))
    assert shelf.standing == (999, 0, 1, 0), "its blobs are being stored"
    claims.publish(version)
    assert shelf.standing == (742, 0, 258, 0)


def test_cancelled_and_expired_uploads_no_longer_count(shelf: Shelf) -> None:
    shelf.limit(1000)
    upload = shelf.declare(600)
    shelf.declare(400, lifetime_us=0)
    assert shelf.standing == (0, 600, 400, 0)
    shelf.intake.cancel_upload(upload.adapter_id, upload.id)
    assert shelf.standing == (0, 0, 1000, 0)


def test_racing_declarations_never_exceed_the_limit(shelf: Shelf) -> None:
    shelf.limit(1000)

    def attempt(number: int) -> bool:
        try:
            shelf.declare(400 + number, number)
        except QuotaExceeded:
            return False
        return True

    with ThreadPoolExecutor(8) as threads:
        assert sorted(threads.map(attempt, range(8))) == [False] * 6 + [True] * 2


def test_soft_limit_counts_an_excess_upload_once(shelf: Shelf) -> None:
    shelf.limit(1000, mode="soft")
    upload = shelf.declare(1500)
    shelf.intake.add_version(upload.adapter_id, upload.id)
    assert shelf.standing == (1500, 0, 0, 1)
