"""At four times the trained length, each kind of rotary scaling gives the same logits as transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Phi3Config, Phi3ForCausalLM, PreTrainedModel

from loramux.engine.protocol.messages import Add, SamplingParams
from tests.conformance.parity import TOLERANCE, Recorder, Subject, run
from tests.conformance.tiny_models import SMALL_SHAPE, VOCAB_SIZE

STRETCH = 4
FEW_TOKENS = 5
FACTORS = {"short": 0.15, "long": 0.9}
"""How the factors of LongRoPE grow with the frequency."""

NUM_PAIRS = SMALL_SHAPE["hidden_size"] // SMALL_SHAPE["num_attention_heads"] // 2


def make_model(kind: str, trained: int) -> PreTrainedModel:
    """A random model that was trained on `trained` tokens and scales its rotary embedding by `kind`."""
    length = trained if kind == "dynamic" else STRETCH * trained
    shape = {**SMALL_SHAPE, "max_position_embeddings": length}
    rope: dict[str, Any] = {"rope_type": kind, "rope_theta": 1e4}
    if kind == "longrope":
        rope |= {f"{name}_factor": [1 + grow * pair for pair in range(NUM_PAIRS)] for name, grow in FACTORS.items()}
        config = Phi3Config(**shape, pad_token_id=0, original_max_position_embeddings=trained, rope_parameters=rope)
        return Phi3ForCausalLM(config)
    rope["factor"] = float(STRETCH)
    if kind == "yarn":
        rope["original_max_position_embeddings"] = trained
    return LlamaForCausalLM(LlamaConfig(**shape, tie_word_embeddings=False, rope_parameters=rope))


@pytest.mark.parametrize("kind", ["yarn", "longrope", "dynamic", "linear"])
@pytest.mark.parametrize(
    "trained", [pytest.param(32, id="32"), pytest.param(512, id="512", marks=pytest.mark.campaign)]
)
@torch.no_grad()
def test_a_stretched_context_equals_transformers(
    kind: str, trained: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """transformers derives angles from the current length, and loramux from the longest. Here, both are `length`."""
    torch.manual_seed(3)
    model = make_model(kind, trained).float().eval()
    model.save_pretrained(tmp_path)
    length = STRETCH * trained
    assembled = Subject(tmp_path, model, {}, {}, {}).assemble(max_model_len=length)
    recorder = Recorder(assembled.engine, monkeypatch)
    num_prompt = length - FEW_TOKENS
    prompt = torch.randint(2, VOCAB_SIZE, (num_prompt,)).tolist()
    sampling = SamplingParams(temperature=0.0, ignore_eos=True)
    assembled.engine.add(b"", Add(sequence_id="one", prompt=tuple(prompt), max_tokens=FEW_TOKENS, sampling=sampling))
    run(assembled.engine)
    ours = torch.stack(recorder.by_sequence["one"])
    tokens = torch.tensor([[*prompt, *ours.argmax(-1).tolist()]])
    theirs = model(input_ids=tokens).logits[0, num_prompt - 1 : -1]
    assert (ours - theirs).abs().max() <= TOLERANCE * theirs.abs().max()
    assembled.adapters.close()
