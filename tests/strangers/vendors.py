"""The suites: which sdist contains each, which of its files are unpacked, and how its tests are run."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from tests.strangers.stand import BASES

HERE = Path(__file__).parent
STAND_IN = HERE / "stand_in"


@dataclass(frozen=True, slots=True)
class Vendor:
    name: str
    requirement: str
    patterns: tuple[str, ...]
    """The files of the sdist that the suite needs."""
    plugin: str | None
    tests: tuple[str, ...]
    bases: tuple[str, ...]
    """The servers that the suite calls."""
    options: tuple[str, ...] = field(default=())
    """Options of pytest."""

    @property
    def expected(self) -> Path:
        return HERE / "expected" / f"{self.name}.toml"


VENDORS = (
    Vendor(
        "vllm",
        "vllm==0.33.0",
        ("tests/__init__.py", "tests/entrypoints/*", "tests/tool_use/*"),
        "vllm_suite",
        (
            "tests/entrypoints/openai",
            "tests/entrypoints/tool_parsers",
            "tests/tool_use",
            "tests/entrypoints/anthropic/test_messages.py",
            "tests/entrypoints/pooling/basic/test_truncation.py",
            "tests/entrypoints/pooling/classify/test_online.py",
            "tests/entrypoints/pooling/embed/test_online.py",
            "tests/entrypoints/pooling/scoring/test_bi_encoder_online.py",
            "tests/entrypoints/pooling/scoring/test_cross_encoder_online.py",
            "tests/entrypoints/serve/tokenize/test_tokenization.py",
            "tests/entrypoints/serve/instrumentator/test_basic.py",
            "tests/entrypoints/serve/lora/test_lora_adapters.py",
        ),
        tuple(BASES),
        # Evaluations download data, some tests start tool servers, and the last file tests only vLLM itself. The load
        # is tested with a longer answer than the demo's model gives.
        (
            "--deselect=tests/entrypoints/serve/instrumentator/test_basic.py::test_server_load",
            *(
                f"--ignore=tests/{path}"
                for path in (
                    "entrypoints/openai/correctness",
                    "entrypoints/openai/responses/test_harmony.py",
                    "entrypoints/openai/responses/test_mcp_tools.py",
                    "entrypoints/openai/responses/test_parsable_context.py",
                    "tool_use/test_tool_choice_required.py",
                )
            ),
        ),
    ),
    Vendor(
        "sglang",
        "sglang==0.5.10.post1",
        ("sglang/test/kits/*", "sglang/test/tool_call_test_runner.py"),
        None,
        (str(STAND_IN / "served_kits.py"),),
        ("chat", "tools"),
    ),
    Vendor(
        "openai",
        "openai==3.57.0",
        ("tests/*",),
        "openai_suite",
        (
            "tests/api_resources/chat/test_completions.py",
            "tests/api_resources/test_completions.py",
            "tests/api_resources/test_models.py",
        ),
        ("tools",),
        ("-o", "asyncio_mode=auto", "-o", "asyncio_default_fixture_loop_scope=session"),
    ),
)
