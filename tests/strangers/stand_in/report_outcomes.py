"""A pytest plugin that reports each test's outcome to the harness, as lines of JSON on a pipe."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from typing import Any

import pytest

PIPE = "STRANGERS_PIPE"
"""The environment variable with the pipe's file descriptor."""


def _send(**fields: Any) -> None:
    os.write(int(os.environ[PIPE]), json.dumps(fields).encode() + b"\n")


def _reason(report: pytest.TestReport) -> str:
    crash = getattr(report.longrepr, "reprcrash", None)
    if isinstance(report.longrepr, tuple):
        return str(report.longrepr[2])
    return str(crash.message if crash else report.longrepr)


class OutcomeReporter:
    def __init__(self) -> None:
        self._worst: dict[str, tuple[str, str]] = {}

    @pytest.hookimpl(trylast=True)
    def pytest_collection_finish(self, session: pytest.Session) -> None:
        _send(collected=len(session.items))

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            _send(test=report.nodeid, outcome="failed", reason=str(report.longrepr)[-1000:])

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """A test has failed if its setup, its call or its teardown has failed."""
        known = self._worst.get(report.nodeid)
        if known is None or report.failed or (report.skipped and known[0] == "passed"):
            self._worst[report.nodeid] = (report.outcome, "" if report.passed else _reason(report)[:2000])

    def pytest_runtest_logfinish(self, nodeid: str, location: Sequence[Any]) -> None:
        outcome, reason = self._worst.pop(nodeid)
        _send(test=nodeid, outcome=outcome, reason=reason)


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(OutcomeReporter())
