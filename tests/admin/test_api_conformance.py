"""Random calls over both OpenAPI documents: no 5xx, no status, header or body that is not documented.

LORAMUX_API_CASES says how many calls `make campaign-api` makes, LORAMUX_API_SEED which ones.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from loramux.admin.app import create_admin_app
from loramux.admin.rest import document as admin_document
from loramux.platform import document as openai_document
from loramux.platform.app import create_openai_app
from tests.admin.api_cases import Cases, call_all
from tests.admin.conftest import ADMIN_KEY, TARGET, open_admin_side
from tests.admin.gateways import open_services, served

CASES = int(os.environ.get("LORAMUX_API_CASES", "20000"))
SEED = int(os.environ.get("LORAMUX_API_SEED", "1"))


@pytest.mark.parametrize("listener", ["admin", "openai"])
def test_a_few_calls_of_every_operation_are_answered_as_documented(
    listener: str, tmp_path: Path, demo_base: Path
) -> None:
    cases = _run(listener, tmp_path, demo_base, 150 if listener == "admin" else 40)
    assert cases.num_calls >= 20


@pytest.mark.campaign
@pytest.mark.parametrize("listener", ["admin", "openai"])
def test_many_calls_are_answered_as_documented(listener: str, tmp_path: Path, demo_base: Path) -> None:
    cases = _run(listener, tmp_path, demo_base, CASES * 9 // 10 if listener == "admin" else CASES // 10)
    print(f"\n{listener}: {cases.num_calls} cases, {dict(sorted(cases.statuses.items()))}")


def _run(listener: str, directory: Path, demo_base: Path, num_cases: int) -> Cases:
    with open_admin_side(directory, TARGET) as side, open_services(side.services.database, demo_base) as services:
        tenant = side.services.tenants.create("acme")
        adapter = side.services.registry.create_adapter(tenant.id, "support")
        known = {"tenant": "acme", "id_or_slug": "acme", "adapter_id": adapter.id, "model": "the-base"}
        if listener == "admin":
            app, key = create_admin_app(side.services), ADMIN_KEY
            document = admin_document.document_of(app)
        else:
            app, key = create_openai_app(services), side.services.api_keys.create(tenant.id, "caller").secret
            document = openai_document.document_of(app)
        with served(lambda: app) as url:
            return call_all(document, url, key, known, num_cases, SEED)
