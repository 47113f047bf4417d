from __future__ import annotations

import logging

import pytest

from tests.logged_records import LoggedRecords


def reported(records: LoggedRecords, outcome: str, when: str) -> list[tuple[str, str]]:
    """The sections of the report of one phase of a test."""
    report = pytest.TestReport("a test", ("file", 1, "a test"), {}, outcome, None, when)
    steps = records.pytest_runtest_makereport(pytest.CallInfo.from_call(lambda: None, when))
    next(steps)
    with pytest.raises(StopIteration):
        steps.send(report)
    return report.sections


def test_only_a_failed_test_reports_what_it_has_logged() -> None:
    records = LoggedRecords()
    for number in range(2):
        records.handle(logging.makeLogRecord({"msg": f"said by {number}"}))
        assert reported(records, "passed", "setup") == []
        assert reported(records, "failed", "call") == [("Logged until call", f"said by {number}")]
        # The next test begins without these records.
        assert reported(records, "passed", "teardown") == []


def test_records_of_libraries_reach_the_report(pytestconfig: pytest.Config) -> None:
    (records,) = (one for one in pytestconfig.pluginmanager.get_plugins() if isinstance(one, LoggedRecords))
    assert records in logging.getLogger().handlers
