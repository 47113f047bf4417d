"""Adds what a failed test has logged to its report.

pytest's own plugin attaches handlers before and after each phase of a test, and visits every logger of the process to
do so. torch and transformers have hundreds. This takes 1 % of the tests' time.
"""

from __future__ import annotations

import logging
from collections.abc import Generator

import pytest


class LoggedRecords(logging.Handler):
    """Keeps the records of one test."""

    def __init__(self) -> None:
        super().__init__()
        self._lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self._lines.append(self.format(record))

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self) -> None:
        # It is still attached, unless the last test configured logging.
        logging.getLogger().addHandler(self)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, call: pytest.CallInfo[None]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        report = yield
        if report.failed and self._lines:
            report.sections.append((f"Logged until {call.when}", "\n".join(self._lines)))
        if call.when == "teardown":
            self._lines.clear()
        return report
