from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.admin.serving.test_serve import ENVIRONMENT

JOIN = """
import asyncio, ctypes, sys
from pathlib import Path
from loramux.admin.server.settings import Settings
from loramux.admin.serving.cluster import ClusterMember
from loramux.engine.loop.config import EngineConfig
from loramux.platform.engine_link.local_engine import EngineStartError

PR_GET_DUMPABLE = 3
settings = Settings(model=Path(sys.argv[1]), cluster="127.0.0.1:1", blob_url="s3://bucket/prefix")
config = EngineConfig(model_dir=sys.argv[1], blob_url="s3://bucket/prefix", cache_dir="")
libc = ctypes.CDLL(None)
before = libc.prctl(PR_GET_DUMPABLE, 0, 0, 0, 0)
try:
    asyncio.run(ClusterMember(settings, config).spawn())
except EngineStartError:
    print(before, libc.prctl(PR_GET_DUMPABLE, 0, 0, 0, 0))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="prctl is Linux's")
def test_server_of_a_cluster_hides_its_secrets_from_its_link_process(demo_base: Path) -> None:
    command = [sys.executable, "-c", JOIN, str(demo_base)]
    done = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, timeout=60)
    assert done.stdout == "1 0\n", done.stderr
