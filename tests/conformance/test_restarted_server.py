"""A server that is stopped and started again."""

from __future__ import annotations

import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from openai import OpenAI

from loramux.admin.client.client import AdminClient
from loramux.admin.client.push import push_adapter
from tests.conformance.served import deployment
from tests.demo_base import DEMO_BASE


def answer_of(client: OpenAI) -> str:
    asked: Any = [{"role": "user", "content": "What is the capital of France?"}]
    answer = client.chat.completions.create(model="harbour/pirate", messages=asked, temperature=0, max_tokens=24)
    return answer.choices[0].message.content or ""


@pytest.mark.campaign
def test_a_restart_keeps_everything_and_an_interrupt_drains(tmp_path: Path) -> None:
    made = deployment(DEMO_BASE, tmp_path / "data", (), {})
    with made.running():
        with AdminClient(f"http://127.0.0.1:{made.admin_port}", made.admin_key) as operator:
            operator.post("tenants", {"slug": "harbour"})
            key = operator.post("api_keys", {"tenant": "harbour"})["secret"]
            push_adapter(operator, DEMO_BASE.parent / "adapters" / "pirate", "harbour", "pirate")
        first = answer_of(made.client(key))
    with made.running() as server:
        assert answer_of(made.client(key)) == first != ""
        started = threading.Event()

        def read_on() -> str | None:
            reason = None
            for chunk in made.client(key).completions.create(
                model="pirate",
                prompt="Arr",
                max_tokens=200,
                temperature=0,
                stream=True,
                extra_body={"ignore_eos": True},
            ):
                started.set()
                reason = chunk.choices[0].finish_reason or reason
            return reason

        with ThreadPoolExecutor(1) as threads:
            reading = threads.submit(read_on)
            assert started.wait(30)
            server.send_signal(signal.SIGINT)
            assert reading.result() == "length"
        assert server.wait(60) == 0
