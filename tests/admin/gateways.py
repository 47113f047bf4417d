"""The OpenAI side over a database of the admin tests, with an engine that repeats the prompt."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

import httpx
from fastapi import FastAPI

from loramux.adapter_store.registry.registry import AdapterRegistry
from loramux.admin.server.http_servers import HttpServer
from loramux.admin.server.listeners import bind, url_of
from loramux.migrations.database import Database
from loramux.platform.accounts.api_keys import ApiKeys
from loramux.platform.accounts.tenants import Tenants
from loramux.platform.engine_link.scripted_engine import ScriptedEngine
from loramux.platform.openai_api.services import GatewayServices, ModelInfo
from loramux.platform.tokenizer.model_tokenizer import ModelTokenizer

CONTEXT = 256


@contextmanager
def open_services(database: Database, demo_base: Path) -> Iterator[GatewayServices]:
    with ThreadPoolExecutor(4) as executor:
        services = GatewayServices.compose(
            database=database,
            tenants=Tenants(database),
            api_keys=ApiKeys(database),
            registry=AdapterRegistry(database),
            engine=ScriptedEngine(max_model_len=CONTEXT),
            tokenizer=ModelTokenizer.load(demo_base),
            model=ModelInfo(served_name="the-base", max_model_len=CONTEXT, vocab_size=1024, created_s=1_700_000_000),
            executor=executor,
        )
        yield services
        services.close()


@contextmanager
def served(make_app: Callable[[], FastAPI]) -> Iterator[str]:
    """An app on a real listener, in a thread; the URL."""
    listener = bind("127.0.0.1", 0, "port")
    url = url_of(listener)
    server = HttpServer(make_app(), listener)
    thread = threading.Thread(target=lambda: asyncio.run(server.run_until_stopped()))
    thread.start()
    with httpx.Client(base_url=url, trust_env=False, verify=False) as client:
        for _ in range(500):
            with suppress(httpx.TransportError):
                client.get("/health/live")
                break
            time.sleep(0.02)
    try:
        yield url
    finally:
        server.stop()
        thread.join(10)
