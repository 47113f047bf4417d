from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import httpx

from loramux.admin.client.client import AdminClient
from loramux.admin.demo.server import DemoServer
from tests.platform.faulty_postgres import FaultyPostgres


@dataclass
class Demo:
    server: DemoServer
    postgres: FaultyPostgres
    client: AdminClient
    keys: dict[str, str]
    adapter_ids: dict[str, str]

    def ask(self, tenant: str, model: str, **fields: Any) -> httpx.Response:
        body = {"model": model, "messages": [{"role": "user", "content": "What is the capital of France?"}], **fields}
        with httpx.Client(trust_env=False, timeout=120) as http:
            return http.post(
                f"{self.server.url}/v1/chat/completions",
                json=body,
                headers={"authorization": f"Bearer {self.keys[tenant]}"},
            )
