"""A GGUF file with a tokenizer is accepted wherever a model directory is."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from safetensors.torch import load_file
from typer.testing import CliRunner

from loramux.adapter_store.formats.quantization.base_weights import BaseWeights
from loramux.admin.check.adapter_check import check_directory, check_gguf
from loramux.admin.check.base_check import check_base
from loramux.admin.cli import app
from loramux.admin.doctor.doctor import HostSettings, check_host
from loramux.admin.doctor.memory_plan import plan_memory
from loramux.admin.errors import StartRefused
from loramux.admin.server.gguf_base import with_model_directory
from loramux.admin.server.settings import Settings, SettingsError, load_settings
from loramux.engine.llm import LLM, SamplingParams
from loramux.engine.protocol.errors import ModelNotSupported
from loramux.platform.tokenizer.model_tokenizer import ModelTokenizer
from tests.adapter_store.gguf.llama_cpp import write_gguf
from tests.adapter_store.gguf.vocabularies import sentencepiece_metadata, trained_pieces
from tests.conformance.gguf_models import GgufFamily, by_turns, write_base
from tests.conformance.tiny_models import SMALL_SHAPE, AdapterPlan, add_adapters, make_base

TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"


@pytest.fixture(scope="module")
def gguf_base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("gguf")
    entries = sentencepiece_metadata(trained_pieces())
    shape = {**SMALL_SHAPE, "vocab_size": len(entries["tokenizer.ggml.tokens"]) + 3}
    model = make_base("llama", directory / "float", shape)
    path = directory / "tiny.Q8_0.gguf"
    del entries["general.architecture"]
    entries["tokenizer.chat_template"] = TEMPLATE
    write_base(model, path, GgufFamily("llama", permutes=True), by_turns(("Q8_0",)), entries)
    return path


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def test_check_and_plan_describe_the_file(gguf_base: Path) -> None:
    verdict = check_base(gguf_base)
    assert (verdict.is_served, verdict.path, verdict.warnings) == (True, str(gguf_base), ())
    assert verdict.facts["quantization"] == "gguf Q8_0"
    assert (verdict.facts["architecture"], verdict.facts["chat_template"]) == ("LlamaForCausalLM", True)
    plans = {plan.format: plan for plan in plan_memory(gguf_base, "cpu")}
    assert set(plans) == {"bfloat16", "gguf Q8_0"}
    assert plans["gguf Q8_0"].weights < plans["bfloat16"].weights


def test_check_and_doctor_say_what_is_wrong(gguf_base: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(gguf_base.read_bytes()[:-64])
    verdict = check_base(broken)
    assert not verdict.is_served
    assert "the tensor extends beyond the end of the file" in verdict.problems[0].message
    for path, grades in ((gguf_base, ["ok", "ok"]), (broken, ["failed", "failed"])):
        findings = {it.check: it for it in check_host(HostSettings(model=path, data_dir=tmp_path / "data"))}
        assert [findings[name].grade.value for name in ("model", "tokenizer")] == grades


def test_a_server_keeps_the_description_in_its_data_directory(gguf_base: Path, tmp_path: Path) -> None:
    settings = load_settings(Settings, {"model": gguf_base, "data_dir": tmp_path / "data"})
    served = with_model_directory(settings)
    assert served.model.parent == tmp_path / "data" / "gguf"
    assert served.resolved_served_name == "tiny.Q8_0"
    assert json.loads((served.model / "config.json").read_text())["hidden_size"] == 128
    assert BaseWeights(served.model).rows("lm_head", 0, 2).shape == (2, 128)
    assert ModelTokenizer.load(served.model).chat_template is not None
    named = load_settings(Settings, {"model": gguf_base, "data_dir": tmp_path / "data", "served_name": "mine"})
    assert with_model_directory(named).resolved_served_name == "mine"
    with pytest.raises(SettingsError, match="there is no file"):
        load_settings(Settings, {"model": tmp_path / "absent.gguf", "data_dir": tmp_path / "data"})
    (tmp_path / "bad.gguf").write_bytes(b"GGUF")
    bad = load_settings(Settings, {"model": tmp_path / "bad.gguf", "data_dir": tmp_path / "data"})
    with pytest.raises(StartRefused, match=r"bad\.gguf is not served: the file ends inside its header"):
        with_model_directory(bad)


def test_python_programs_generate_text(gguf_base: Path, tmp_path: Path) -> None:
    with LLM(gguf_base, device="cpu", dtype="float32", pool_bytes=8 << 20) as llm:
        greedy = SamplingParams(temperature=0.0, ignore_eos=True)
        [answer] = llm.generate("The quick brown fox", max_tokens=5, sampling=greedy)
    assert len(answer.token_ids) == 5
    assert answer.prompt_token_ids
    assert len(list((tmp_path / "cache" / "loramux" / "gguf").iterdir())) == 1
    with pytest.raises(ModelNotSupported, match="cannot be opened"):
        LLM(tmp_path / "absent.gguf")


def test_a_tokenizer_with_more_tokens_than_the_embedding_is_refused(gguf_base: Path, tmp_path: Path) -> None:
    entries = sentencepiece_metadata(trained_pieces())
    del entries["general.architecture"]
    model = make_base("llama", tmp_path / "float", SMALL_SHAPE)
    path = tmp_path / "small.gguf"
    write_base(model, path, GgufFamily("llama", permutes=True), by_turns(("F16",)), entries)
    [problem] = check_base(path).problems
    assert "tokens, but the embedding has 320 rows" in problem.message


def test_adapters_of_both_kinds_are_checked_against_the_file(gguf_base: Path, tmp_path: Path) -> None:
    model = make_base("llama", tmp_path / "float", {**SMALL_SHAPE, "vocab_size": 320})
    add_adapters(model, [AdapterPlan("r4", 4, ["q_proj", "down_proj"])], tmp_path / "adapters")
    directory = tmp_path / "adapters" / "r4"
    verdict = check_directory(directory, gguf_base)
    assert (verdict.is_served, verdict.problems) == (True, ())
    tensors = load_file(directory / "adapter_model.safetensors")
    heads = {"num_heads": SMALL_SHAPE["num_attention_heads"], "num_kv_heads": SMALL_SHAPE["num_key_value_heads"]}
    write_gguf(tmp_path / "adapter.gguf", tensors, alpha=16.0, **heads)
    converted = check_gguf(tmp_path / "adapter.gguf", gguf_base)
    assert (converted.is_served, converted.facts["digest"]) == (True, verdict.facts["digest"])
    [problem] = check_base(tmp_path / "adapter.gguf").problems
    assert "general.type is adapter, not model; check an adapter against its base, with --model" in problem.message


def test_the_command_line_checks_the_file(gguf_base: Path, tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["check", str(gguf_base)])
    assert result.exit_code == 0, result.output
    assert f"{gguf_base} would be served" in result.output.replace("\n", "")
    (tmp_path / "bad.gguf").write_bytes(b"GGUF")
    result = CliRunner().invoke(app, ["check", str(tmp_path / "bad.gguf")])
    assert result.exit_code == 1
    assert "the file ends inside its header" in result.output.replace("\n", " ")
