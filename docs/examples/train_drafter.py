"""Train a drafter for one adapter of a base with a head for drafts as MiMo's, and save the adapter with it.

python docs/examples/train_drafter.py BASE ADAPTER ANSWERS OUT

Each line of ANSWERS is a JSON object with the token IDs of a prompt, and those of the adapter's answer to it:
{"prompt": [1, 2], "answer": [3, 4]}. The drafter predicts the adapter's answers, so these are the best examples. These
lines write them:

    with LLM(BASE, {"mine": ADAPTER}) as llm, open(ANSWERS, "w") as file:
        for one in llm.generate(prompts, adapter="mine"):
            file.write(json.dumps({"prompt": one.prompt_token_ids, "answer": one.token_ids}) + "\n")

The base is in float32, on a GPU if there is one. What the base computed for all examples stays in memory: 8 bytes per
token and element of a hidden state.
"""

from __future__ import annotations

import argparse
import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn
from torch.nn.functional import cross_entropy
from transformers import Qwen2Config, Qwen2ForCausalLM
from transformers.models.qwen2.modeling_qwen2 import Qwen2DecoderLayer, Qwen2RMSNorm
from transformers.utils import logging

PREFIX = "model.mtp_layers.0"
RANK = 16
LEARNING_RATE = 2e-3
NUM_EPOCHS = 4

Example = tuple[torch.Tensor, int]
"""The tokens of a prompt and its answer, and the number of the prompt's tokens."""


class Head(Qwen2DecoderLayer):
    """The head. Its tensors have the names of the checkpoint."""

    def __init__(self, config: Qwen2Config) -> None:
        super().__init__(config, 0)
        size = config.hidden_size
        self.token_layernorm = Qwen2RMSNorm(size, config.rms_norm_eps)
        self.hidden_layernorm = Qwen2RMSNorm(size, config.rms_norm_eps)
        self.input_proj = nn.Linear(2 * size, size, bias=False)
        self.final_layernorm = Qwen2RMSNorm(size, config.rms_norm_eps)

    def predict(self, states: torch.Tensor, embedded: torch.Tensor, model: Qwen2ForCausalLM) -> torch.Tensor:
        """Logits of the token after the next one, `[num_tokens, vocab_size]`.

        `states` `[num_tokens, hidden_size]` is the input of the base's final norm. `embedded` are the embeddings of the
        next tokens.
        """
        x = self.input_proj(torch.cat([self.hidden_layernorm(states), self.token_layernorm(embedded)], dim=-1))[None]
        angles = model.model.rotary_emb(x, torch.arange(x.shape[1], device=x.device)[None])
        return own_layer(model.lm_head)(self.final_layernorm(self(x, position_embeddings=angles)[0]))


class Lora(nn.Module):
    """`layer(x) + B(A(x))`."""

    def __init__(self, layer: nn.Linear, rank: int) -> None:
        super().__init__()
        self.layer = layer
        self.A = nn.Parameter(torch.randn(rank, layer.in_features) * layer.in_features**-0.5)
        self.B = nn.Parameter(torch.zeros(layer.out_features, rank))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) + x @ self.A.T @ self.B.T


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a drafter for an adapter of a MiMo.")
    for name in ("base", "adapter", "answers", "out"):
        parser.add_argument(name, type=Path)
    given = parser.parse_args()
    if given.out.exists():
        parser.error(f"{given.out} exists already")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    model = PeftModel.from_pretrained(load_base(given.base).to(device), given.adapter).get_base_model()
    head = load_head(given.base, model.config)
    drafter = add_lora(head, RANK)
    head.to(device)
    train([*parameters_of(drafter)], head, model, read_examples(given.answers), NUM_EPOCHS, LEARNING_RATE)
    save(drafter, given.adapter, given.out)


def load_base(base: Path) -> Qwen2ForCausalLM:
    """The base without its head. MiMo is a Qwen 2 otherwise."""
    # This class does not know the head's tensors, and would list them.
    logging.set_verbosity_error()
    model = Qwen2ForCausalLM.from_pretrained(base, config=Qwen2Config.from_pretrained(base), dtype=torch.float32)
    return model.requires_grad_(False).eval()


def load_head(base: Path, config: Qwen2Config) -> Head:
    head, tensors = Head(config), {}
    for path in base.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            names = [name for name in file.keys() if name.startswith(f"{PREFIX}.")]  # noqa: SIM118
            tensors.update({name.removeprefix(f"{PREFIX}."): file.get_tensor(name).float() for name in names})
    head.load_state_dict(tensors)
    return head.requires_grad_(False)


def add_lora(head: Head, rank: int) -> dict[str, Lora]:
    """Put a LoRA beside each linear layer of the head, and return them by the layers' names."""
    linears = {name: layer for name, layer in head.named_modules() if isinstance(layer, nn.Linear)}
    drafter = {name: Lora(layer, rank) for name, layer in linears.items()}
    for name, lora in drafter.items():
        head.set_submodule(name, lora)
    return drafter


def parameters_of(drafter: Mapping[str, Lora]) -> Iterator[nn.Parameter]:
    for lora in drafter.values():
        yield from (lora.A, lora.B)


def read_examples(path: Path) -> list[Example]:
    lines = map(json.loads, path.read_text().splitlines())
    return [(torch.tensor(line["prompt"] + line["answer"]), len(line["prompt"])) for line in lines]


def train(
    parameters: Sequence[nn.Parameter],
    head: Head,
    model: Qwen2ForCausalLM,
    examples: Sequence[Example],
    num_epochs: int,
    learning_rate: float,
) -> list[float]:
    """Train parameters of the head on the model's states, and return the mean loss of each epoch."""
    on_device = [(tokens.to(model.device), num_prompt) for tokens, num_prompt in examples]
    read = [(*inputs_of(model, tokens), tokens, num_prompt) for tokens, num_prompt in on_device]
    optimizer = torch.optim.AdamW(parameters, lr=learning_rate, weight_decay=0.0)
    steps = num_epochs * len(read)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, learning_rate, total_steps=steps)
    losses = []
    for epoch in range(num_epochs):
        total = 0.0
        for place in torch.randperm(len(read)).tolist():
            states, embedded, tokens, num_prompt = read[place]
            # The head reads a token's state and the next token, and predicts the one after it. Learn only answers.
            logits = head.predict(states[:-2], embedded[1:-1], model)[max(0, num_prompt - 2) :]
            loss = cross_entropy(logits, tokens[max(2, num_prompt) :])
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(parameters, 1.0)
            optimizer.step()
            schedule.step()
            total += loss.item()
        losses.append(total / len(read))
        print(f"epoch {epoch + 1}: loss {losses[-1]:.3f}", flush=True)
    return losses


@torch.no_grad()
def inputs_of(model: Qwen2ForCausalLM, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """What the head reads: the input of the base's final norm, with the adapter, and the base's embeddings."""
    seen: list[torch.Tensor] = []
    hook = model.model.norm.register_forward_pre_hook(lambda norm, inputs: seen.append(inputs[0][0]))
    model.model(input_ids=tokens[None])
    hook.remove()
    return seen[0], own_layer(model.model.embed_tokens)(tokens)


def own_layer(module: Any) -> Any:
    """The base's layer, without a LoRA and without trained rows. The head for drafts uses this embedding and output."""
    for wrapped in ("original_module", "base_layer"):
        while hasattr(module, wrapped):
            module = getattr(module, wrapped)
    return module


@torch.no_grad()
def save(drafter: Mapping[str, Lora], adapter: Path, out: Path) -> None:
    """Copy the adapter, and add the drafter's tensors under the names that PEFT would give them."""
    shutil.copytree(adapter, out)
    config_file, tensors_file = out / "adapter_config.json", out / "adapter_model.safetensors"
    config, tensors = json.loads(config_file.read_text()), load_file(tensors_file)
    ranks, alphas = {}, {}
    for name, lora in drafter.items():
        key, rank = f"{PREFIX}.{name}", len(lora.A)
        # Scales are alpha / rank, or alpha / sqrt(rank) with rsLoRA. Patterns in front of the adapter's own come first.
        ranks[key], alphas[key] = rank, rank**0.5 if config.get("use_rslora") else rank
        tensors[f"base_model.model.{key}.lora_A.weight"] = lora.A.cpu().contiguous()
        tensors[f"base_model.model.{key}.lora_B.weight"] = lora.B.cpu().contiguous()
    config["rank_pattern"] = ranks | (config.get("rank_pattern") or {})
    config["alpha_pattern"] = alphas | (config.get("alpha_pattern") or {})
    save_file(tensors, tensors_file)
    config_file.write_text(json.dumps(config, indent=2))


if __name__ == "__main__":
    main()
