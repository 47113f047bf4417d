"""docs/examples/train, which made the adapters of the real demo."""

from __future__ import annotations

import runpy
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch.nn.functional import cross_entropy
from transformers import LlamaConfig, LlamaForCausalLM

from loramux.admin.demo.real.grading import GRADES
from loramux.admin.demo.real.held_out import PROMPTS
from tests.docs.write import DOCS

FOLDER = DOCS / "examples" / "train"


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Its folder, from which its modules can be imported, as when its scripts run."""
    monkeypatch.syspath_prepend(FOLDER)
    before = set(sys.modules)
    yield FOLDER
    for name in set(sys.modules) - before:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(str(FOLDER)):
            del sys.modules[name]


def module(name: str) -> ModuleType:
    __import__(name)
    return sys.modules[name]


def test_script_writes_the_shipped_prompts(example: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["hold_out.py", str(tmp_path)])
    runpy.run_path(str(example / "hold_out.py"))
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {
        path.name: path.read_text() for path in PROMPTS.iterdir()
    }


def test_no_held_out_sentence_is_trained_on(example: Path) -> None:
    examples, train = module("examples"), module("train")
    for task in module("tasks").TASKS:
        trained = examples.draw_training(task, task.num_steps * train.BATCH, train.SEED)
        held_out = examples.draw_held_out(task, 200, 200)
        known = {sentence for one in trained for sentence in one.sentences}
        assert not any(sentence in known for one in held_out for sentence in one.sentences)
        assert all(sentence in one.prompt for one in held_out for sentence in one.sentences)


def test_trained_answers_satisfy_the_rules(example: Path) -> None:
    for task in module("tasks").TASKS:
        for one in module("examples").draw_training(task, 300, 1):
            assert GRADES[task.name](one.expected, one.answer), one


def test_loss_with_a_common_prefix_is_the_plain_loss(example: Path) -> None:
    train = module("train")
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=50,
    )
    lora = LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    model = get_peft_model(LlamaForCausalLM(config), lora)
    rows = [([5, 6, 7, 8, 9], [10, 11]), ([5, 6, 7, 20], [21, 22, 23]), ([5, 6, 7, 30, 31, 32], [33])]
    prefix = train.common_prefix([prompt for prompt, _ in rows])
    assert prefix == [5, 6, 7]
    (batch,) = train.sorted_batches([(prompt[3:], answer) for prompt, answer in rows])
    losses = []
    for prompt, answer in rows:
        logits = model(input_ids=torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1]
        losses.append(cross_entropy(logits, torch.tensor(answer), reduction="sum"))
    expected = sum(losses) / 6
    found = train.answer_loss(model, prefix, *batch)
    torch.testing.assert_close(found, expected)
    expected.backward()
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    gradients = [weight.grad.clone() for weight in weights]
    model.zero_grad()
    found.backward()
    for weight, gradient in zip(weights, gradients, strict=True):
        torch.testing.assert_close(weight.grad, gradient)


def test_saved_adapter_is_bfloat16_and_training_goes_on_in_float32(example: Path, tmp_path: Path) -> None:
    train = module("train")
    config = LlamaConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2
    )
    model = get_peft_model(LlamaForCausalLM(config), LoraConfig(r=2, target_modules=["q_proj"]))
    before = {name: weight.clone() for name, weight in model.named_parameters()}
    train.save(model, tmp_path)
    assert all(torch.equal(weight, before[name]) for name, weight in model.named_parameters())
    assert (tmp_path / "adapter_model.safetensors").stat().st_size < 1000
