"""SGLang's test kits, run against our server. The kits contain the tests. A class names the server that they call."""

from __future__ import annotations

import unittest
from collections.abc import Iterator
from typing import Any, ClassVar

import pytest
from absent_modules import allow_absent
from renaming_proxy import RenamingProxy, Target
from served_base import served_base

allow_absent(("sglang", "torch"), {})

import sglang.test.tool_call_test_runner as tool_calls  # noqa: E402
from sglang.test.kits.abort_timeout_kit import AbortAllMixin  # noqa: E402
from sglang.test.kits.ebnf_constrained_kit import EBNFConstrainedMixin  # noqa: E402
from sglang.test.kits.json_constrained_kit import JSONConstrainedMixin  # noqa: E402
from sglang.test.kits.matched_stop_kit import MatchedStopMixin  # noqa: E402
from sglang.test.kits.regex_constrained_kit import RegexConstrainedMixin  # noqa: E402

DUMMY_KEYS = ("EMPTY", "sk-test")


class _Served(unittest.TestCase):
    base: ClassVar[str] = "chat"
    base_url: ClassVar[str]
    model: ClassVar[str]
    _proxy: ClassVar[RenamingProxy]

    @classmethod
    def setUpClass(cls) -> None:
        base = served_base(cls.base)
        cls._proxy = RenamingProxy(Target(base.host, base.port, base.key, {}, DUMMY_KEYS))
        cls.base_url, cls.model = f"http://127.0.0.1:{cls._proxy.port}", base.model

    @classmethod
    def tearDownClass(cls) -> None:
        cls._proxy.close()


class TestJson(JSONConstrainedMixin, _Served):  # type: ignore[misc]
    pass


class TestRegex(RegexConstrainedMixin, _Served):  # type: ignore[misc]
    pass


class TestEbnf(EBNFConstrainedMixin, _Served):  # type: ignore[misc]
    pass


class TestMatchedStop(MatchedStopMixin, _Served):  # type: ignore[misc]
    pass


class TestAbort(AbortAllMixin, _Served):  # type: ignore[misc]
    abort_all_num_requests = 4


@pytest.fixture(scope="module")
def tools_client() -> Iterator[Any]:
    import openai

    base = served_base("tools")
    proxy = RenamingProxy(Target(base.host, base.port, base.key, {}, DUMMY_KEYS))
    yield openai.Client(api_key="sk-test", base_url=f"http://127.0.0.1:{proxy.port}/v1", max_retries=0)
    proxy.close()


@pytest.mark.parametrize(
    "name", [name.removeprefix("_test_") for name in vars(tool_calls) if name.startswith("_test_")]
)
def test_tool_calls(name: str, tools_client: Any) -> None:
    getattr(tool_calls, f"_test_{name}")(tools_client, served_base("tools").model)
