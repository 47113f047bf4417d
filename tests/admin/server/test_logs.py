from __future__ import annotations

import subprocess
import sys

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
