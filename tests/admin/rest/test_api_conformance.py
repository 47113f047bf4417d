"""Random calls generated from both OpenAPI documents: no 5xx, and no undocumented status, header or body.

In `make campaign NAME=api`, LORAMUX_API_CASES sets the number of calls and LORAMUX_API_SEED the random seed.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from loramux.admin.rest.adapters import events
from loramux.admin.serving.app import ADMIN_DOCUMENT, create_admin_app
from loramux.platform.listener.app import OPENAI_DOCUMENT
from tests.adapter_store.validation.hostile import TARGET
from tests.admin.admin_side import open_admin_side
from tests.admin.openai_side import open_services, served, whole_app
from tests.admin.rest.api_stock import ApiStock
from tests.reliability.record import recorded

if TYPE_CHECKING:
    from tests.admin.rest.api_cases import Cases

CASES = int(os.environ.get("LORAMUX_API_CASES", "20000"))
SEED = int(os.environ.get("LORAMUX_API_SEED", "1"))


@pytest.fixture(autouse=True)
def short_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    """End streams of events at once, because the calls wait for the end of a response."""
    monkeypatch.setattr(events, "LIFETIME_S", 0.01)
    monkeypatch.setattr(events, "HEARTBEAT_S", 0.01)


@pytest.mark.parametrize("listener", ["admin", "openai"])
def test_a_few_calls_of_every_operation_are_answered_as_documented(
    listener: str, tmp_path: Path, demo_base: Path
) -> None:
    cases = _run(listener, tmp_path, demo_base, 0 if listener == "admin" else 100, is_thorough=False)
    assert cases.num_calls >= (100 if listener == "admin" else 20)


@pytest.mark.campaign
@pytest.mark.parametrize("listener", ["admin", "openai"])
def test_many_calls_are_answered_as_documented(listener: str, tmp_path: Path, demo_base: Path) -> None:
    from tests.admin.rest.api_cases import Cases

    cases = Cases()
    try:
        with recorded("api") as figures:
            try:
                num_calls = CASES * 9 // 10 if listener == "admin" else CASES // 10
                _run(listener, tmp_path, demo_base, num_calls, cases=cases)
            finally:
                errors = sum(number for status, number in cases.statuses.items() if status >= 500)
                figures |= {"calls": cases.num_calls, "server_errors": errors}
    finally:
        # Print the figures even if the run fails or is interrupted.
        answered = dict(sorted(cases.statuses.items()))
        print(f"\n{listener}: {cases.num_calls} calls with {cases.num_generated} generated cases, {answered}")


def _run(
    listener: str,
    directory: Path,
    demo_base: Path,
    num_calls: int,
    is_thorough: bool = True,
    cases: Cases | None = None,
) -> Cases:
    # Every process that collects the tests would import schemathesis, which takes most of a second.
    from tests.admin.rest.api_cases import call_all

    with open_admin_side(directory, TARGET) as side, open_services(side.services.database, demo_base) as services:
        stock = ApiStock(side)
        if listener == "admin":
            app, keys = create_admin_app(side.services), stock.admin_keys()
            document = ADMIN_DOCUMENT.of(app)
        else:
            app, keys = (
                whole_app(services, side),
                [stock.caller, *stock.admin_keys()[-1:]],
            )
            document = OPENAI_DOCUMENT.of(app)
        with served(lambda: app) as url:
            return call_all(document, url, keys, stock.names, num_calls, SEED, is_thorough, cases)
