from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterator
from typing import Any

import httpx
import msgspec

from tests.conformance.fleet_lab import FleetLab, is_paced_engine
from tests.conformance.gateway_lab import PATIENCE_S, LabGateway, children_of, is_running, until
from tests.conformance.noted_ends import NotedEnd

NUM_ENGINES = 2


class EnginesLab(FleetLab):
    """Servers that share requests, each with two paced engines."""

    def wait_ready(self, gateway: LabGateway) -> None:
        """Wait until both engines of the server are ready, and until it is connected to all other servers."""
        super().wait_ready(gateway)
        until(lambda: self.are_engines_ready(gateway))

    def are_engines_ready(self, gateway: LabGateway) -> bool:
        url = f"http://127.0.0.1:{gateway.settings['admin_port']}/health/ready"
        engines = httpx.get(url, trust_env=False, timeout=PATIENCE_S).json().get("engines", {})
        return list(engines.values()) == [True] * NUM_ENGINES

    def kill_one_engine(self, gateway: LabGateway, number: int) -> None:
        """Kill one of a server's engines, and wait until the server has started another."""
        killed = self.engine_pids(gateway)[number]
        os.kill(killed, signal.SIGKILL)
        until(lambda: not is_running(killed) and len(self.engine_pids(gateway)) == NUM_ENGINES)
        self.wait_ready(gateway)

    def engine_pids(self, gateway: LabGateway) -> list[int]:
        return sorted(pid for pid in children_of(gateway.pid) if is_running(pid) and is_paced_engine(pid))

    def _settings(self, number: int) -> dict[str, Any]:
        settings = super()._settings(number)
        return {**settings, "data_parallel_size": NUM_ENGINES, "num_threads": NUM_ENGINES, "pool_bytes": 64 << 20}

    def _ends(self) -> Iterator[NotedEnd]:
        """As for other servers, by the names that sequences have on the servers that sent them."""
        for end in super()._ends():
            yield msgspec.structs.replace(end, sequence_id=re.sub(r"^peer-\d+-", "", end.sequence_id))
