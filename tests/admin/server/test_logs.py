from __future__ import annotations

import subprocess
import sys
import unicodedata

import pytest
import structlog

from loramux.admin.server.logs import REPEAT_S, RepeatedTrouble

LOG = """
import logging, sys, structlog
from loramux.admin.server.logs import configure_logs
configure_logs(sys.argv[1])
for _ in range(2):
    structlog.get_logger().error("x" * 10_000)
    logging.getLogger("library").error("y")
print("goes on")
"""


@pytest.mark.parametrize("log_format", ["console", "json"])
def test_full_log_disk_stops_nothing(log_format: str) -> None:
    with open("/dev/full", "w") as full:
        ended = subprocess.run(
            [sys.executable, "-c", LOG, log_format], stdout=subprocess.PIPE, stderr=full, text=True, check=False
        )
    assert ended.stdout == "goes on\n"


UNSAFE_LOG = """
import logging, structlog
from loramux.admin.server.logs import configure_logs
configure_logs("console")
unsafe = "\x1b]52;c;eA==\x07\x9b2J\u202e"
logging.getLogger("library").error(unsafe)
try:
    raise ValueError(unsafe)
except ValueError:
    structlog.get_logger().exception("failed", path=f"/{unsafe}", texts=[unsafe])
"""


def test_text_of_others_cannot_control_the_terminal() -> None:
    ended = subprocess.run([sys.executable, "-c", UNSAFE_LOG], capture_output=True, text=True, check=True)
    assert ended.stderr.count("52;c;eA==") >= 4
    assert {unicodedata.category(one) for one in ended.stderr.replace("\n", "")}.isdisjoint({"Cc", "Cf"})


class Log:
    """What a log of background work contains, in seconds of a clock that only `wait` moves."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.keep = RepeatedTrouble(lambda: self.now_s)

    def wait(self, seconds: float) -> None:
        self.now_s += seconds

    def logs(self, name: str = "evals cannot be claimed; trying again", **fields: object) -> dict[str, object] | None:
        try:
            return dict(self.keep(None, "warning", {"event": name, **fields}))
        except structlog.DropEvent:
            return None


def test_lasting_trouble_of_background_work_is_logged_once_a_minute() -> None:
    log = Log()
    shown = []
    for _ in range(121):
        shown.append(log.logs(error="the database does not answer"))
        log.wait(1)
    assert [line.get("left_out", 0) for line in shown if line is not None] == [0, 59, 59]
    assert [second for second, line in enumerate(shown) if line is not None] == [0, 60, 120]


def test_only_the_same_trouble_counts_as_repeated() -> None:
    log = Log()
    assert log.logs(error="the database does not answer")
    assert log.logs(error="disk full")
    assert log.logs("batches cannot be claimed; trying again", error="the database does not answer")
    assert not log.logs(error="the database does not answer")


def test_lines_of_requests_tracebacks_and_other_events_are_always_logged() -> None:
    log = Log()
    for _ in range(2):
        assert log.logs(request_id="req_1")
        assert log.logs(exc_info=True)
        assert log.logs("engine died")


def test_trouble_whose_text_differs_each_time_does_not_fill_memory() -> None:
    log = Log()
    for number in range(1000):
        log.logs(error=str(number))
        log.wait(REPEAT_S / 4)
    assert len(log.keep._logged) < 10
