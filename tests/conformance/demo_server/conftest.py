"""One server of the demo's base, in float32, for all modules of this folder.

The demo itself runs in the base's bfloat16. Each module uses tenants of its own. `tests/conftest.py` keeps the folder's
modules in one process.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.conformance.served import Deployment, deployment
from tests.demo_base import DEMO_BASE

FOLDER = Path(__file__).parent
RUNNING: pytest.StashKey[tuple[Deployment, ExitStack]] = pytest.StashKey()


@pytest.fixture(scope="module")
def demo_server(pytestconfig: pytest.Config, tmp_path_factory: pytest.TempPathFactory) -> Deployment:
    if RUNNING not in pytestconfig.stash:
        made = deployment(DEMO_BASE, tmp_path_factory.mktemp("demo_server") / "data", ("--dtype", "float32"), {})
        with ExitStack() as stack:
            stack.enter_context(made.running())
            pytestconfig.stash[RUNNING] = made, stack.pop_all()
    return pytestconfig.stash[RUNNING][0]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> Generator[None, None, None]:
    """Stop the server before the first test of another folder, even if a fixture of the last one fails to end."""
    try:
        yield
    finally:
        if RUNNING in item.config.stash and (nextitem is None or FOLDER not in nextitem.path.parents):
            _, stack = item.config.stash[RUNNING]
            del item.config.stash[RUNNING]
            stack.close()
