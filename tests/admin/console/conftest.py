from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from starlette.types import ASGIApp

from tests.admin.admin_side import ADMIN_KEY
from tests.admin.app_client import client_of
from tests.admin.console.signed_in_browser import Browser


@pytest.fixture
async def operator(console_app: ASGIApp) -> AsyncIterator[Browser]:
    async with client_of(console_app) as client:
        browser = Browser(client)
        await browser.sign_in(ADMIN_KEY)
        yield browser
