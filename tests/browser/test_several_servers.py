"""The console's pages about other servers: three servers share requests, and a fourth has a new version of the base."""

from __future__ import annotations

import itertools
import shutil
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest

from loramux.admin.client.push import push_adapter
from loramux.admin.demo.run import DEMO_FILES, STYLES
from loramux.admin.demo.server import DemoServer
from tests.browser.console_tab import keep_screenshot, signed_in_tabs
from tests.ports import free_port
from tests.postgres import create_database

pytestmark = [pytest.mark.campaign, pytest.mark.timeout(900)]

NUM_SHARING = 3
NUM_CLIENTS = 12


@pytest.fixture(scope="module")
def servers(postgres_server: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[DemoServer]]:
    """Three servers that share requests, and one with other weights."""
    directory = tmp_path_factory.mktemp("servers")
    shared = ["--database-url", create_database(postgres_server, "several_servers")]
    shared += ["--blob-url", f"file://{directory / 'blobs'}"]
    # One server cannot run the requests of all clients, so every server gets some.
    config = directory / "loramux.toml"
    config.write_text(f'max_sequences = {NUM_CLIENTS // NUM_SHARING}\npool_bytes = "8MiB"\n')
    shared += ["--config", str(config)]
    with ExitStack() as stack:

        def start(name: str, model: Path, *more: str) -> DemoServer:
            ports = free_port(), free_port()
            server = DemoServer(model, directory / name, *ports, STYLES.served_name, [*shared, *more])
            stack.callback(server.stop)
            with server.client() as client:
                server.wait_until(client.is_ready, "ready")
            return server

        # The first server creates the tables.
        models = [DEMO_FILES / "base"] * NUM_SHARING
        sharing = [start(f"sharing-{i}", model, "--peer-address", "127.0.0.1:0") for i, model in enumerate(models)]
        yield [*sharing, start("next", with_other_weights(directory / "next-base"))]


def with_other_weights(model: Path) -> Path:
    shutil.copytree(DEMO_FILES / "base", model)
    weights = bytearray((model / "model.safetensors").read_bytes())
    weights[-100] ^= 1
    (model / "model.safetensors").write_bytes(weights)
    return model


def test_pages_show_every_server(chromium: Any, servers: list[DemoServer]) -> None:
    keys = {}
    with servers[0].client() as client:
        for tenant, adapter in STYLES.adapters.items():
            client.post("tenants", {"slug": tenant})
            keys[tenant] = client.post("api_keys", {"tenant": tenant, "name": "demo"})["secret"]
            push_adapter(client, DEMO_FILES / "adapters" / adapter, tenant, adapter)
    is_over = threading.Event()

    def ask_repeatedly(number: int) -> None:
        tenant, adapter = list(STYLES.adapters.items())[number % len(STYLES.adapters)]
        body = {"model": adapter, "prompt": "Tell me a story.", "max_tokens": 400, "ignore_eos": True}
        headers = {"authorization": f"Bearer {keys[tenant]}"}
        with httpx.Client(trust_env=False, timeout=120, headers=headers) as http:
            for turn in itertools.count(number):
                if is_over.is_set():
                    return
                url = f"{servers[turn % NUM_SHARING].url}/v1/completions"
                assert http.post(url, json=body).status_code == 200

    with signed_in_tabs(chromium, servers[0]) as new_tab, ThreadPoolExecutor(NUM_CLIENTS) as clients:
        asking = [clients.submit(ask_repeatedly, number) for number in range(NUM_CLIENTS)]
        try:
            with servers[0].client() as client:

                def holds_adapters() -> list[int]:
                    return [one["num_adapters"] for one in client.get("replicas")["data"]]

                servers[0].wait_until(lambda: all(holds_adapters()), "one of three servers with adapters")
                held = holds_adapters()
            holder = held.index(max(held))
            tab = new_tab()
            page = tab.open("/residency")
            rows = page.locator("[aria-label=Servers] tbody tr")
            assert rows.count() == NUM_SHARING
            rows.nth(holder).locator("a").click()
            page.wait_for_selector(f"[aria-label=Servers] tr:nth-child({holder + 1}) a[aria-current]")
            page.wait_for_selector("[aria-label=Adapters] tbody tr")
            assert not tab.serious()
            keep_screenshot(page, "residency-of-three-servers")

            with servers[-1].client() as client:

                def is_validated() -> bool:
                    return all(base["num_pending"] == 0 for base in client.get("bases")["data"])

                servers[-1].wait_until(is_validated, "done with the versions of the old base")
            page = tab.open("/bases")
            rows = page.locator("[aria-label=Bases] tbody tr")
            assert [rows.nth(i).locator("td:nth-child(3) > div").count() for i in (0, 1)] == [NUM_SHARING, 1]
            assert not tab.serious()
            page.set_viewport_size({"width": 1440, "height": 440})
            keep_screenshot(page, "bases-of-several-servers")
        finally:
            is_over.set()
        for one in asking:
            one.result()
