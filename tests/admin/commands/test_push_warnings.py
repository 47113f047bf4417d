from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from tests.admin.command_line import printed_json

COPIES = ("base_model.model.model.embed_tokens.weight", "base_model.model.lm_head.weight")


def with_copies(directory: Path) -> Path:
    """Add whole matrices, as PEFT saves them after `resize_token_embeddings`."""
    path = directory / "adapter_model.safetensors"
    generator = np.random.default_rng(0)
    copies = {name: generator.standard_normal((64, 32)).astype(np.float32) for name in COPIES}
    save_file({**load_file(path), **copies}, path)
    return directory


def test_push_warns_of_copies_of_the_base(loramux: Callable[..., Any], make_adapter: Callable[..., Path]) -> None:
    loramux("tenants", "create", "acme")
    push = ("--tenant", "acme", "--name")
    clean = loramux("adapters", "push", make_adapter(), *push, "clean")
    assert (clean.exit_code, "warning" in clean.stderr) == (0, False), clean.output
    pushed = loramux("adapters", "push", with_copies(make_adapter()), *push, "copies")
    assert pushed.exit_code == 0, pushed.output
    assert "warning: the file has copies of the base's weights" in pushed.stderr
    assert "save_embedding_layers=False" in pushed.stderr
    assert "acme/copies version 1 is ready" in pushed.stdout
    document = printed_json(loramux("adapters", "push", with_copies(make_adapter()), *push, "copies", "--json"))
    assert [(one["code"], one["count"]) for one in document["warnings"]] == [("base_weights_included", 2)]


@pytest.mark.parametrize("saves_layers", [None, False])
def test_peft_saves_whole_matrices_after_a_resize_unless_told_otherwise(
    tmp_path: Path, saves_layers: bool | None
) -> None:
    """`docs/concepts.md` says so, also for adapters that train only the new tokens' rows."""
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaConfig, LlamaForCausalLM

    size = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    base = LlamaForCausalLM(LlamaConfig(vocab_size=32, tie_word_embeddings=True, **size))
    base.save_pretrained(tmp_path / "base")
    model = LlamaForCausalLM.from_pretrained(tmp_path / "base")
    model.resize_token_embeddings(34)
    tokens = {"embed_tokens": [32, 33]}
    model = get_peft_model(model, LoraConfig(target_modules=["q_proj"], trainable_token_indices=tokens))
    options: dict[str, Any] = {} if saves_layers is None else {"save_embedding_layers": saves_layers}
    if saves_layers is None:
        with pytest.warns(UserWarning, match="has been resized"):
            model.save_pretrained(tmp_path / "adapter", **options)
    else:
        model.save_pretrained(tmp_path / "adapter", **options)
    saved = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    whole = [name for name, values in saved.items() if values.shape[0] == 34]
    assert bool(whole) is (saves_layers is None), sorted(saved)
    assert any(values.shape[0] == 2 for values in saved.values())
