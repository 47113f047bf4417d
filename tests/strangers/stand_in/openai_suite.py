"""A pytest plugin that points openai-python's tests of its API resources at our server."""

from __future__ import annotations

import os

import pytest
from renaming_proxy import RenamingProxy, Target
from served_base import served_base

MODELS = ("gpt-6-astra", "gpt-3.5-turbo-instruct")
DUMMY_KEYS = ("My API Key", "My Admin API Key")


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests(early_config: pytest.Config) -> None:
    base = served_base("tools")
    proxy = RenamingProxy(Target(base.host, base.port, base.key, dict.fromkeys(MODELS, base.model), DUMMY_KEYS))
    # The suite's conftest reads the address when it is imported.
    os.environ["TEST_API_BASE_URL"] = f"http://127.0.0.1:{proxy.port}/v1"
    early_config.add_cleanup(proxy.close)
