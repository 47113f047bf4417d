"""Files of experts that contradict the configuration, and a router that returns NaN for one token."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from loramux.engine.protocol.errors import ModelNotSupported
from loramux.engine.protocol.messages import Add, Finished, SamplingParams
from tests.conformance.parity import Recorder, Subject, assert_parity, make_subject
from tests.conformance.tiny_models import SMALL_SHAPE, AdapterPlan, make_base

GREEDY = SamplingParams(temperature=0.0, ignore_eos=True)
POISON = 2
PLANS = [AdapterPlan("r3", 3, ["q_proj", "down_proj"])]


def base(family: str, directory: Path) -> Path:
    make_base(family, directory, SMALL_SHAPE)
    return directory


def change(directory: Path, **fields: object) -> None:
    path = directory / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


CONTRADICTIONS: list[tuple[str, dict[str, object], str]] = [
    ("qwen3-moe", {"num_local_experts": 9}, r"gate\.weight has shape \[8, 128\], but config\.json says \[9, 128\]"),
    ("qwen3-moe", {"num_local_experts": 7}, r"gate\.weight has shape \[8, 128\], but config\.json says \[7, 128\]"),
    ("qwen3-moe", {"moe_intermediate_size": 64}, r"experts\.0\.gate_proj\.weight has shape \[56, 128\]"),
    ("qwen3-moe", {"mlp_only_layers": [0, 1]}, r"no tensor model\.layers\.0\.mlp\.gate_proj\.weight"),
    ("qwen3-moe", {"mlp_only_layers": []}, r"no tensor model\.layers\.1\.mlp\.gate\.weight"),
    ("qwen2-moe", {"shared_expert_intermediate_size": 80}, r"shared_expert\.gate_proj\.weight has shape \[88, 128\]"),
    ("granite-moe", {"intermediate_size": 64}, r"input_linear\.weight has shape \[5, 416, 128\]"),
    ("olmoe", {"intermediate_size": 96}, r"experts\.0\.gate_proj\.weight has shape \[208, 128\]"),
    ("glm4_moe", {"n_routed_experts": 12}, r"correction_bias has shape \[8\], but config\.json says \[12\]"),
    ("gpt-oss", {"intermediate_size": 96}, r"gate_up_proj_bias has shape \[6, 416\], but config\.json says \[6, 192\]"),
    ("glm4_moe", {"n_shared_experts": 2}, r"shared_experts\.gate_proj\.weight has shape \[56, 128\]"),
]


@pytest.mark.parametrize(("family", "fields", "message"), CONTRADICTIONS)
def test_files_that_contradict_the_configuration_are_refused(
    tmp_path: Path, family: str, fields: dict[str, object], message: str
) -> None:
    change(base(family, tmp_path), **fields)
    with pytest.raises(ModelNotSupported, match=message):
        Subject(tmp_path, None, {}, {}, {}).assemble()


def test_a_missing_expert_and_a_superfluous_one_are_refused(tmp_path: Path) -> None:
    directory = base("mixtral", tmp_path)
    path, name = directory / "model.safetensors", "model.layers.1.block_sparse_moe.experts.{}.w3.weight"
    tensors = load_file(path)
    save_file({**tensors, name.format(4): tensors[name.format(3)].clone()}, path)
    with pytest.raises(ModelNotSupported, match=r"does not use, such as .*experts\.4\.w3\.weight"):
        Subject(tmp_path, None, {}, {}, {}).assemble()
    del tensors[name.format(2)]
    save_file(tensors, path)
    with pytest.raises(ModelNotSupported, match=r"no tensor .*experts\.2\.w3\.weight"):
        Subject(tmp_path, None, {}, {}, {}).assemble()


@pytest.mark.parametrize(
    ("family", "name", "value"),
    [
        ("glm4_moe", "mlp.gate.e_score_correction_bias", torch.nan),
        ("glm4_moe", "mlp.gate.e_score_correction_bias", torch.inf),
        ("gpt-oss", "self_attn.sinks", torch.nan),
    ],
)
def test_a_correction_or_a_sink_that_is_not_finite_is_refused(
    tmp_path: Path, family: str, name: str, value: float
) -> None:
    path, name = base(family, tmp_path) / "model.safetensors", f"model.layers.1.{name}"
    tensors = load_file(path)
    tensors[name][3] = value
    save_file(tensors, path)
    with pytest.raises(ModelNotSupported, match=f"the tensor {name} contains NaN or infinity"):
        Subject(tmp_path, None, {}, {}, {}).assemble()


def test_tensors_of_layers_that_predict_further_tokens_are_not_read(tmp_path: Path) -> None:
    """Released GLM-4.5 checkpoints have one such layer, after the last decoder layer."""
    path = base("glm4_moe", tmp_path) / "model.safetensors"
    further = {"model.layers.2.eh_proj.weight": torch.zeros(4, 8), "model.layers.2.mlp.gate.weight": torch.zeros(8, 4)}
    save_file({**load_file(path), **further}, path)
    change(tmp_path, num_nextn_predict_layers=1)
    Subject(tmp_path, None, {}, {}, {}).assemble().adapters.close()
    change(tmp_path, num_nextn_predict_layers=0)
    with pytest.raises(ModelNotSupported, match=r"2 tensors that its architecture does not use"):
        Subject(tmp_path, None, {}, {}, {}).assemble()


@pytest.mark.parametrize("family", ["qwen2-moe", "glm4_moe"])
def test_a_router_that_gives_nan_for_a_token_ends_only_its_request(
    tmp_path: Path, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    subject = make_subject(family, tmp_path, PLANS, SMALL_SHAPE)
    path = subject.directory / "model.safetensors"
    tensors = load_file(path)
    # Only rows of this token become NaN, from the first router on.
    tensors["model.embed_tokens.weight"][POISON] = torch.nan
    save_file(tensors, path)
    assembled = subject.assemble()
    recorder = Recorder(assembled.engine, monkeypatch)
    prompts = {"r3": (5, 9, 20, 4), None: (30, 8, 6), "poisoned": (5, POISON, 9)}
    asked = {
        name: Add(
            sequence_id=str(name),
            prompt=prompt,
            max_tokens=4,
            sampling=GREEDY,
            digest=subject.digests["r3"] if name == "r3" else None,
        )
        for name, prompt in prompts.items()
    }
    for add in asked.values():
        assembled.engine.add(b"", add)
    ends = {}
    while assembled.engine.has_work:
        assembled.engine.step()
        for outbound in assembled.engine.take_outbox():
            if isinstance(outbound.message, Finished):
                ends[outbound.message.sequence_id] = outbound.message
    assert (ends["poisoned"].code, ends["poisoned"].completion_tokens) == ("not_finite", 0)
    for name in ("r3", None):
        assert_parity(subject, name, asked[name], recorder.by_sequence[str(name)])
    assembled.adapters.close()
