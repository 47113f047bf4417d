"""Embeddings of a served model, compared with those that sentence-transformers makes of the same files."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from tests.conformance.served import deployment
from tests.demo_base import DEMO_BASE

pytestmark = pytest.mark.campaign

HERE = Path(__file__).parent
PYTHON = HERE.parents[1] / ".venv-sentences" / "bin" / "python"
TEXTS = ["Where is my order?", "A parcel is late. " * 9, "Yes", "The harbour of Port Vale lies quiet."]
TOLERANCE = 1e-5
"""Largest difference in one element, as a part of the largest element."""


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("mode", "is_normalized"), [("mean", True), ("lasttoken", False), ("cls", True)], ids=["mean", "last", "cls"]
)
def test_the_files_of_sentence_transformers_give_the_same_vectors(
    mode: str, is_normalized: bool, tmp_path: Path
) -> None:
    base = tmp_path / "base"
    config = AutoConfig.from_pretrained(DEMO_BASE)
    torch.manual_seed(7)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(base)
    for name in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"):
        (base / name).write_bytes((DEMO_BASE / name).read_bytes())
    command = [str(PYTHON), str(HERE / "sentence_vectors.py"), str(base), mode, json.dumps(is_normalized)]
    done = subprocess.run([*command, json.dumps(TEXTS)], capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    expected = np.array(json.loads(done.stdout.splitlines()[-1]))
    assert (base / "modules.json").exists()
    made = deployment(base, tmp_path / "data", ("--dtype", "float32"), {})
    with made.running():
        made.json("tenants", "create", "harbour")
        client = made.client(made.json("keys", "create", "--tenant", "harbour")["secret"])
        answer = client.embeddings.create(model="demo-base", input=TEXTS)
    found = np.array([one.embedding for one in answer.data])
    np.testing.assert_allclose(found, expected, rtol=0, atol=TOLERANCE * np.abs(expected).max())
    lengths = np.linalg.norm(found, axis=1)
    assert np.allclose(lengths, 1, atol=1e-5) == is_normalized
