from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
import structlog
from jinja2 import Environment
from starlette.types import ASGIApp

from loramux.adapter_store.blobs.interface import BlobStore
from loramux.adapter_store.blobs.local import LocalBlobStore
from loramux.adapter_store.formats.packed.pack_target import PackTarget
from loramux.adapter_store.sources.adapter_sources import AdapterSources
from loramux.admin.console import rendering
from loramux.admin.serving.app import create_admin_app
from tests.admin.admin_side import ADMIN_KEY, TARGET, AdminSide, open_admin_side
from tests.admin.app_client import client_of
from tests.admin.command_line import Run, command_line
from tests.admin.compiled_templates import CompiledTemplates
from tests.admin.peft_directory import MakeAdapter, write_peft_directory
from tests.admin.running_server import RunningServer, SharedServer, open_shared_server, start_server


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(autouse=True)
def log() -> Iterator[list[Any]]:
    """Capture the services' log entries, so that they do not mix with the command line's output."""
    with structlog.testing.capture_logs() as entries:
        yield entries


@pytest.fixture(scope="session", autouse=True)
def compiled_templates() -> Iterator[None]:
    """Compile the console's templates once. Each of hundreds of apps would compile them again."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rendering, "Environment", partial(Environment, bytecode_cache=CompiledTemplates()))
        yield


@pytest.fixture
def admin_blobs(tmp_path: Path) -> BlobStore:
    return LocalBlobStore(tmp_path / "blobs")


@pytest.fixture
def admin_target() -> PackTarget:
    return TARGET


@pytest.fixture
def admin_sources() -> AdapterSources:
    return AdapterSources()


@pytest.fixture
def admin_side(
    tmp_path: Path, admin_target: PackTarget, admin_blobs: BlobStore, admin_sources: AdapterSources
) -> Iterator[AdminSide]:
    with open_admin_side(tmp_path, admin_target, admin_blobs, admin_sources) as side:
        yield side


@pytest.fixture
async def http(admin_side: AdminSide) -> AsyncIterator[httpx.AsyncClient]:
    transport = httpx.ASGITransport(create_admin_app(admin_side.services))
    headers = {"authorization": f"Bearer {ADMIN_KEY}"}
    async with httpx.AsyncClient(transport=transport, base_url="http://admin", headers=headers) as client:
        yield client


@pytest.fixture
def admin_server(admin_side: AdminSide) -> Iterator[RunningServer]:
    running = start_server(create_admin_app(admin_side.services))
    yield running
    running.stop()


@pytest.fixture(scope="module")
def shared_server() -> Iterator[SharedServer]:
    with open_shared_server() as server:
        yield server


@pytest.fixture
def admin_url(admin_side: AdminSide, shared_server: SharedServer) -> str:
    """The URL of the services on the module's server, for tests that leave no request running."""
    shared_server.app = create_admin_app(admin_side.services)
    return shared_server.url


@pytest.fixture
def loramux(admin_url: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Run:
    return command_line(admin_url, monkeypatch, tmp_path / "config")


@pytest.fixture
def make_adapter(tmp_path: Path) -> MakeAdapter:
    """Write a PEFT directory for TARGET, with new weights on every call."""
    return partial(write_peft_directory, tmp_path)


@pytest.fixture(scope="module")
def console_side(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AdminSide]:
    """Services shared by the module's tests. Each test adds the objects it needs."""
    with open_admin_side(tmp_path_factory.mktemp("console"), TARGET) as side:
        yield side


@pytest.fixture(scope="module")
def console_app(console_side: AdminSide) -> ASGIApp:
    return create_admin_app(console_side.services)


@pytest.fixture
async def browser(console_app: ASGIApp) -> AsyncIterator[httpx.AsyncClient]:
    async with client_of(console_app) as client:
        yield client
