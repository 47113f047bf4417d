from __future__ import annotations

import subprocess
import sys
import unicodedata

import pytest

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
