"""Memory of a server that has answered requests, beside the plan of `loramux doctor --plan`."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import httpx

from benchmarks.memory import descendants, proportional_set_size
from loramux.admin.demo.server import DemoServer
from loramux.admin.doctor.memory_plan import plan_memory
from tests.ports import free_port
from tests.real.findings import Finding
from tests.real.models import RealModel

POOL_BYTES = 64 << 20
NUM_TOKENS = 1024
MAX_RATIO = 1.05
"""A server may take less than the plan, which has to hold for all models, but not more than this."""

FORMATS = ("bfloat16", "int8", "int4")


def memory(model: RealModel, num_prompts: int) -> Iterator[Finding]:
    plans = {plan.format: plan for plan in plan_memory(model.directory, "cpu", POOL_BYTES)}
    for kind in FORMATS:
        measured, planned = _measured(model, kind), plans[kind].total
        yield Finding(
            model=model.name,
            what=kind,
            figures={
                "planned_mib": planned >> 20,
                "measured_mib": measured >> 20,
                "ratio": round(measured / planned, 3),
            },
            problem=None if measured <= MAX_RATIO * planned else "the server takes more than planned",
        )


def _measured(model: RealModel, kind: str) -> int:
    more = ["--pool-bytes", str(POOL_BYTES), "--dtype", "bfloat16"]
    more += [] if kind == "bfloat16" else ["--quantization", kind]
    with tempfile.TemporaryDirectory() as folder:
        server = DemoServer(model.directory, Path(folder), free_port(), free_port(), "base", more)
        try:
            with server.client() as client:
                server.wait_until(client.is_ready, "ready")
                client.post("tenants", {"slug": "reader"})
                key = client.post("api_keys", {"tenant": "reader", "name": "campaign"})["secret"]
            for first in range(4):
                # Other tokens each time fill the pool.
                prompt = [100 + first + token % 1000 for token in range(NUM_TOKENS)]
                body = {"model": "base", "prompt": prompt, "max_tokens": 16, "temperature": 0}
                headers = {"Authorization": f"Bearer {key}"}
                httpx.post(
                    f"{server.url}/v1/completions", json=body, headers=headers, timeout=600, trust_env=False
                ).raise_for_status()
            return sum(map(proportional_set_size, descendants(server.pid)))
        finally:
            server.stop()
