"""Run the tests that start no process and need no database server: `make test-fast`.

The folders below have quick tests. The plugin in this module (`-p tests.fast`) holds the rule: tests on PostgreSQL are
deselected, and a test that starts a process is skipped when it does so. `make test` runs both.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Generator, Sequence
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FOLDERS = (
    "tests/adapter_store/formats",
    "tests/adapter_store/gguf",
    "tests/adapter_store/merging",
    "tests/adapter_store/registry",
    "tests/engine/adapters",
    "tests/engine/architectures",
    "tests/engine/constraints",
    "tests/engine/device",
    "tests/engine/execution",
    "tests/engine/loop",
    "tests/engine/pages",
    "tests/engine/scheduling",
    "tests/engine/sequences",
    "tests/engine/server",
    "tests/engine/tracing",
    "tests/platform/accounts",
    "tests/platform/admission",
    "tests/platform/ledger",
    "tests/platform/quotas",
    "tests/platform/routing",
    "tests/platform/tool_calls",
)
"""Folders whose tests together take less than 90 seconds on two cores."""
STARTS = frozenset({"subprocess.Popen", "os.exec", "os.fork", "os.forkpty", "os.posix_spawn", "os.spawn", "os.system"})
"""Audit events of the calls that start a process."""
REASON = "it starts a process"


class NoProcesses:
    """Skips tests that start a process, also in a fixture."""

    def __init__(self) -> None:
        self._is_in_test = False
        self._is_refused = False

    def audit(self, event: str, _: tuple[object, ...]) -> None:
        if self._is_in_test and event in STARTS:
            self._is_refused = True
            # This is not an Exception, so the code under test does not handle it.
            raise pytest.skip.Exception(REASON)

    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        on_server = [item for item in items if _is_on_postgres(item)]
        items[:] = [item for item in items if not _is_on_postgres(item)]
        config.hook.pytest_deselected(items=on_server)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self) -> Generator[None, object, object]:
        self._is_in_test, self._is_refused = True, False
        try:
            return (yield)
        finally:
            self._is_in_test = False

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        report = yield
        # In another thread, the exception does not reach the test.
        if self._is_refused and report.when != "teardown":
            report.outcome = "skipped"
            report.longrepr = (str(item.path), item.location[1] or 0, f"Skipped: {REASON}")
        return report


def pytest_configure(config: pytest.Config) -> None:
    plugin = NoProcesses()
    sys.addaudithook(plugin.audit)
    config.pluginmanager.register(plugin)


def _is_on_postgres(item: pytest.Item) -> bool:
    names = getattr(item, "fixturenames", ())
    parameters = getattr(item, "callspec", None)
    values = parameters.params.values() if parameters else ()
    return any("postgres" in name for name in names) or any(
        isinstance(value, str) and value == "postgres" for value in values
    )


def main(arguments: Sequence[str]) -> int:
    two_at_a_time = ("-n", "2", "--dist", "loadfile", "--no-loadscope-reorder")
    command = [sys.executable, "-m", "pytest", "-p", "tests.fast", *two_at_a_time, *FOLDERS, *arguments]
    return subprocess.run(command, cwd=ROOT, check=False).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
