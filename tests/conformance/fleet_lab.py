from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from tests.conformance.gateway_lab import PATIENCE_S, GatewayLab, LabGateway, children_of, is_running, until
from tests.conformance.noted_ends import NotedEnd, read_ends
from tests.ports import free_port

MAX_SEQUENCES = 8
"""Sequence slots of each engine. They are few, so that some requests are waiting at any moment."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Replacement:
    """A server that was started in place of a killed server. Times are in seconds since its start."""

    ready_s: float
    traffic_s: float
    """When the first sequence of another server arrived at its engine."""


class FleetLab(GatewayLab):
    """Whole servers that share requests, each with a paced engine of its own."""

    def outputs_of(self, gateway: LabGateway) -> Path:
        return Path(f"{gateway.settings['ends']}.outputs")

    def arrivals(self, gateway: LabGateway, since_byte: int) -> list[float]:
        """When sequences arrived at the server's engine, by `time.monotonic`."""
        with self.outputs_of(gateway).open() as file:
            file.seek(since_byte)
            return [float(line.split()[0]) for line in file if line.endswith(" 0\n")]

    def replace(self, gateway: LabGateway) -> Replacement:
        """Start a killed server again, while no client calls it, and wait until others send it a sequence."""
        since_byte = self.outputs_of(gateway).stat().st_size
        started_s = time.monotonic()
        self.start(gateway)
        self.wait_serving(gateway)
        ready_s = time.monotonic()
        until(lambda: self.arrivals(gateway, since_byte))
        [first_s, *_] = self.arrivals(gateway, since_byte)
        return Replacement(ready_s=ready_s - started_s, traffic_s=first_s - started_s)

    def wait_serving(self, gateway: LabGateway) -> None:
        super().wait_ready(gateway)

    def wait_ready(self, gateway: LabGateway) -> None:
        """Wait until the server is connected to all others, too."""
        self.wait_serving(gateway)
        until(lambda: self.metric(gateway, 'loramux_peers{state="connected"}') == len(self.gateways) - 1)

    def kill(self, gateway: LabGateway) -> None:
        """Kill a server with all its processes at once, as the loss of its machine does."""
        processes = [gateway.pid, *children_of(gateway.pid)]
        for pid in processes:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        until(lambda: not any(map(is_running, processes)))

    def kill_engine(self, gateway: LabGateway) -> None:
        """Kill a server's engine. The server starts another."""
        [engine] = [pid for pid in children_of(gateway.pid) if is_paced_engine(pid)]
        os.kill(engine, signal.SIGKILL)
        until(lambda: not is_running(engine))

    def metric(self, gateway: LabGateway, sample: str) -> float:
        url = f"http://127.0.0.1:{gateway.settings['admin_port']}/metrics"
        shown = httpx.get(url, trust_env=False, verify=False, timeout=PATIENCE_S).text
        found = re.search(rf"^{re.escape(sample)} (\S+)$", shown, re.MULTILINE)
        return 0.0 if found is None else float(found[1])

    def num_forwarded(self, gateways: list[LabGateway], outcome: str) -> int:
        sample = f'loramux_forwarded_sequences_total{{outcome="{outcome}"}}'
        return int(sum(self.metric(gateway, sample) for gateway in gateways))

    def _start_engine(self, environment: dict[str, str]) -> subprocess.Popen[bytes] | None:
        return None

    def _settings(self, number: int) -> dict[str, Any]:
        settings = super()._settings(number)
        del settings["engine"]
        return {
            **settings,
            "peer_address": f"127.0.0.1:{free_port()}",
            "device": "cpu",
            "max_sequences": MAX_SEQUENCES,
            "ends": str(self._directory / f"ends-{number}"),
        }

    def _ends(self) -> Iterator[NotedEnd]:
        """As with one engine, except that a sequence whose engine was killed has 0 prompt tokens, the tokens sent so
        far, and no drafts.
        """
        for gateway in self.gateways:
            outputs: defaultdict[str, list[int]] = defaultdict(list)
            for line in self.outputs_of(gateway).read_text().splitlines():
                _, sequence_id, num_tokens = line.split()
                outputs[sequence_id].append(int(num_tokens))
            found = {one: NotedEnd(one, 0, tuple(sent)) for one, sent in outputs.items()}
            found |= {end.sequence_id: end for end in read_ends(Path(gateway.settings["ends"]))}
            yield from found.values()


def is_paced_engine(pid: int) -> bool:
    return b"tests.conformance.paced_engine" in Path(f"/proc/{pid}/cmdline").read_bytes()
