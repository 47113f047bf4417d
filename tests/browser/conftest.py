from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from loramux.admin.client.push import push_adapter
from loramux.admin.demo.run import DEMO_FILES, STYLES
from loramux.admin.demo.server import DemoServer
from tests.browser.browser_tools import chromium_path
from tests.browser.console_tab import NewTab, Tab, signed_in_tabs
from tests.browser.running_demo import Demo
from tests.platform.faulty_postgres import FaultyPostgres, faulty_postgres
from tests.ports import free_port

NUM_QUESTIONS = 4
ARGUMENTS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--no-proxy-server"]


@pytest.fixture(scope="session")
def postgres() -> Iterator[FaultyPostgres]:
    with faulty_postgres() as server:
        yield server


@pytest.fixture(scope="session")
def demo(tmp_path_factory: pytest.TempPathFactory, postgres: FaultyPostgres) -> Iterator[Demo]:
    """A server shared by all tests. It has already answered some requests."""
    data_dir = tmp_path_factory.mktemp("demo")
    more = ["--database-url", postgres.url]
    server = DemoServer(DEMO_FILES / "base", data_dir, free_port(), free_port(), STYLES.served_name, more)
    try:
        with server.client() as client:
            server.wait_until(client.is_alive, "listening")
            demo = Demo(server, postgres, client, {}, {})
            for tenant, adapter in STYLES.adapters.items():
                client.post("tenants", {"slug": tenant})
                client.post("quotas", {"tenant": tenant, "metric": "tokens_per_minute", "limit": 100_000})
                demo.keys[tenant] = client.post("api_keys", {"tenant": tenant, "name": "demo"})["secret"]
                push_adapter(client, DEMO_FILES / "adapters" / adapter, tenant, adapter)
                demo.adapter_ids[tenant] = client.get("adapters", tenant=tenant)["data"][0]["id"]
            server.wait_until(client.is_ready, "ready")
            for tenant, adapter in STYLES.adapters.items():
                for _ in range(NUM_QUESTIONS):
                    assert demo.ask(tenant, adapter, max_tokens=24).status_code == 200
            yield demo
    finally:
        server.stop()


@pytest.fixture(scope="session")
def chromium() -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium_path(), headless=True, args=ARGUMENTS)
        yield browser
        browser.close()


@pytest.fixture
def new_tab(chromium: Any, demo: Demo) -> Iterator[NewTab]:
    with signed_in_tabs(chromium, demo.server) as new:
        yield new


@pytest.fixture
def tab(new_tab: NewTab) -> Tab:
    return new_tab()


@pytest.fixture
def adapter_files() -> Callable[[str], list[str]]:
    def files(name: str) -> list[str]:
        folder: Path = DEMO_FILES / "adapters" / name
        return [str(folder / file) for file in ("adapter_config.json", "adapter_model.safetensors")]

    return files
