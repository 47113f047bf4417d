"""A server quantises its base at the first start, serves adapters over it, and starts again with the same weights."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest

from loramux.admin import demo
from tests.conformance.served import deployment

PIRATE = Path(demo.__file__).parent / "adapters" / "pirate"


@pytest.mark.campaign
@pytest.mark.parametrize("method", ["int8", "int4", "fp8"])
def test_adapters_are_served_over_quantised_weights(demo_base: Path, tmp_path: Path, method: str) -> None:
    server = deployment(demo_base, tmp_path / "data", ("--quantization", method), {})
    answers = []
    for _ in range(2):
        with server.running(tmp_path / "log") as process:
            assert process.stdout is not None
            first = process.stdout.readline()
            assert first.startswith(f"weights quantised to {method}; mean KL divergence from the float model: ")
            second = process.stdout.readline()
            if second.startswith("warning: "):
                second = process.stdout.readline()
            assert f"weights in {method})" in second
            if not answers:
                server.json("tenants", "create", "acme")
                key = server.json("keys", "create", "--tenant", "acme")["secret"]
                server.json("adapters", "push", str(PIRATE), "--tenant", "acme", "--name", "pirate")
            headers = {"Authorization": f"Bearer {server.admin_key}"}
            about = httpx.get(f"http://127.0.0.1:{server.admin_port}/admin/v1/server", headers=headers).json()
            assert about["quantization"] == method
            assert {model.model_extra["quantization"] for model in server.client(key).models.list()} == {method}
            asked = {"messages": [{"role": "user", "content": "What is the capital of France?"}], "temperature": 0}
            texts = [
                server.client(key)
                .chat.completions.create(model=model, max_tokens=24, **asked)
                .choices[0]
                .message.content
                for model in ("demo-base", "acme/pirate")
            ]
            answers.append((first, texts))
    # The second start finds the weights and their quality.
    assert answers[0] == answers[1]
    assert "Paris" in answers[0][1][0]
    assert answers[0][1][0] != answers[0][1][1]
    assert len(list((tmp_path / "data" / "quantized").iterdir())) == 1
