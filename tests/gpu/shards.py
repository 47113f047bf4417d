"""Splits tests among processes: `--shard 2/12` keeps every twelfth test, starting with the third.

A failure is printed at once, because a process that runs out of time prints no summary.
"""

from __future__ import annotations

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--shard", default="0/1", help="share of the tests to run, as INDEX/COUNT")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Select the shard's tests, after `-k` and `-m` have been applied."""
    shard, num_shards = (int(number) for number in config.getoption("shard").split("/"))
    items[:], left = items[shard::num_shards], [item for i, item in enumerate(items) if i % num_shards != shard]
    config.hook.pytest_deselected(items=left)


def pytest_exception_interact(node: pytest.Item, report: pytest.TestReport) -> None:
    node.config.get_terminal_writer().line(f"\n{report.longreprtext}")
