"""Random adapters of three kinds, made with peft, and what transformers and peft say about answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.real.models import RealModel

RANK = 8
NUM_ADDED = 2
SIZE = 0.12
"""Standard deviation of the weights: enough to change most answers, but not to make every answer noise."""

KINDS: dict[str, dict[str, Any]] = {
    "lora": {"target_modules": ["q_proj", "v_proj", "o_proj", "down_proj"]},
    "dora": {"target_modules": ["q_proj", "k_proj", "up_proj"], "use_dora": True},
    "rslora-tokens": {"target_modules": ["v_proj", "gate_proj", "down_proj"], "use_rslora": True, "lora_alpha": 3},
}


def make_adapters(model: RealModel, out: Path) -> dict[str, Path]:
    for number, (kind, settings) in enumerate(KINDS.items()):
        torch.manual_seed(number)
        base = load(model)
        more = {}
        if has_tokens(kind):
            vocab_size = base.config.get_text_config().vocab_size
            base.resize_token_embeddings(vocab_size + NUM_ADDED, mean_resizing=False)
            more["trainable_token_indices"] = list(range(vocab_size, vocab_size + NUM_ADDED))
            tokenizer = AutoTokenizer.from_pretrained(model.directory)
            tokenizer.add_tokens([f"<added-{number}>" for number in range(NUM_ADDED)])
            tokenizer.save_pretrained(out / kind)
        given = {"lora_alpha": RANK, **settings, **more}
        config = LoraConfig(r=RANK, init_lora_weights=False, task_type="CAUSAL_LM", **given)
        adapted = get_peft_model(base, config)
        with torch.no_grad():
            for name, weight in adapted.named_parameters():
                if weight.requires_grad and "magnitude" not in name:
                    weight.normal_(0, SIZE)
        adapted.save_pretrained(out / kind, save_embedding_layers=False)
    return {kind: out / kind for kind in KINDS}


def has_tokens(kind: str) -> bool:
    return kind.endswith("tokens")


def load(model: RealModel) -> Any:
    return AutoModelForCausalLM.from_pretrained(model.directory, dtype=torch.float32)


@dataclass(frozen=True, slots=True)
class Verdict:
    num_different: int
    smallest_lead: float
    """By how much the chosen token's logit led the second one, at the closest choice of all."""


class Oracle:
    """transformers and peft, in float32."""

    def __init__(self, model: RealModel, adapter: Path | None) -> None:
        base = load(model)
        if adapter is not None:
            if has_tokens(adapter.name):
                base.resize_token_embeddings(base.config.get_text_config().vocab_size + NUM_ADDED, mean_resizing=False)
            base = PeftModel.from_pretrained(base, adapter)
        self._model = base.eval()

    @torch.inference_mode()
    def judge(self, prompts: Sequence[Sequence[int]], answers: Sequence[Sequence[int]]) -> Verdict:
        """Count answers that are not the greedy ones.

        One pass over a prompt and its answer shows the best token at each place. If each is the answer's token, then
        greedy decoding, which starts from the same tokens, gives this answer.
        """
        num_different, lead = 0, float("inf")
        for prompt, answer in zip(prompts, answers, strict=True):
            tokens = torch.tensor([[*prompt, *answer]])
            logits = self._model(input_ids=tokens, logits_to_keep=len(answer) + 1).logits[0, :-1]
            best = logits.topk(2, dim=1)
            num_different += best.indices[:, 0].tolist() != list(answer)
            lead = min(lead, float((best.values[:, 0] - best.values[:, 1]).min()))
        return Verdict(num_different, lead)
