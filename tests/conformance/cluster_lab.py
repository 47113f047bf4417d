from __future__ import annotations

import subprocess
import sys
from typing import Any

from tests.cluster.bring_up import started_cluster
from tests.conformance.gateway_lab import GatewayLab

NUM_REPLICAS = 2
DTYPE = "float32"
"""The dtype that a paced engine announces."""


class ClusterLab(GatewayLab):
    """Whole servers in front of the replicas of a local Ray cluster, whose engines are paced ones."""

    def close(self) -> None:
        try:
            super().close()
        finally:
            self._cluster.stop()

    def _start_engine(self, environment: dict[str, str]) -> subprocess.Popen[bytes] | None:
        ends = str(self._directory / "ends")
        settings = {
            "model": str(self._model),
            "data_dir": str(self._directory / "cluster"),
            "blob_url": f"file://{self._directory / 'blobs'}",
            "served_name": "base",
            "device": "cpu",
            "dtype": DTYPE,
            "cluster_replicas": NUM_REPLICAS,
        }
        command = (sys.executable, "-m", "tests.conformance.paced_engine", str(self._model), ends)
        self._cluster, self._head = started_cluster(settings, command)
        return None

    def _maker_environment(self) -> dict[str, str]:
        return dict(self._cluster.environment)

    def _settings(self, number: int) -> dict[str, Any]:
        settings = super()._settings(number)
        del settings["engine"]
        blobs = f"file://{self._directory / 'blobs'}"
        return {**settings, "blob_url": blobs, "device": "cpu", "dtype": DTYPE, "cluster": self._head.address}
