"""`loramux check` says whether a directory would be served, and if not, why."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from loramux.admin.cli import app
from tests.adapter_store.adapter_files import AdapterFiles
from tests.adapter_store.expert_base import stacked_files
from tests.adapter_store.formats.mlx.mlx_files import expert_tensors, write_mlx, write_tensors
from tests.demo_base import DEMO_BASE
from tests.shared_forks import shared_forks

DEMO = DEMO_BASE.parent
PIRATE = DEMO / "adapters" / "pirate"
TOOLS = DEMO / "tools"


@pytest.fixture(scope="module", autouse=True)
def shared_validation_process() -> Iterator[None]:
    with shared_forks():
        yield


def check(*arguments: object) -> Any:
    return CliRunner().invoke(app, ["check", *map(str, arguments)])


def checked(*arguments: object) -> dict[str, Any]:
    result = check(*arguments, "--json")
    document = json.loads(result.stdout)
    assert document["object"] == "check"
    assert result.exit_code == (0 if document["served"] else 1), result.output
    assert document["served"] is not bool(document["problems"])
    return dict(document)


@pytest.fixture
def base(tmp_path: Path) -> Path:
    """A copy of the demo base whose files a test can change."""
    directory = tmp_path / "base"
    shutil.copytree(DEMO_BASE, directory)
    return directory


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    directory = tmp_path / "pirate"
    shutil.copytree(PIRATE, directory)
    return directory


def test_base_is_described() -> None:
    facts = checked(DEMO_BASE)["facts"]
    assert (facts["architecture"], facts["max_model_len"], facts["num_parameters"]) == (
        "LlamaForCausalLM",
        1024,
        2492672,
    )
    assert (facts["chat_template"], facts["takes_tools"], facts["stored_dtypes"]) == (True, False, ["BF16"])
    tools = checked(TOOLS / "base")["facts"]
    assert (tools["takes_tools"], tools["tool_call_parser"], tools["reasoning_parser"]) == (True, "hermes", "think")
    spoken = check(DEMO_BASE)
    assert (spoken.exit_code, spoken.stdout.splitlines()[-1]) == (0, f"{DEMO_BASE} would be served")


def test_an_adapter_in_fp8_takes_half_of_the_pages() -> None:
    facts = checked(DEMO_BASE, "--dtype", "bfloat16")["facts"]
    for rank, num_pages in facts["pages_by_rank"].items():
        assert 0 <= 2 * facts["fp8_pages_by_rank"][rank] - num_pages <= 1


def test_adapter_takes_the_reported_pages() -> None:
    facts = checked(DEMO / "adapters" / "json", "--model", DEMO_BASE)["facts"]
    assert facts["max_rank"] == 16
    assert facts["num_pages"] == checked(DEMO_BASE)["facts"]["pages_by_rank"]["16"]
    assert facts["modules"]["mlp.up_proj"]["ranks"] == [16] * 4
    concierge = checked(TOOLS / "adapters" / "concierge", "--model", TOOLS / "base")["facts"]
    assert concierge["chat_template"]["size"] == (TOOLS / "adapters/concierge/chat_template.jinja").stat().st_size
    spoken = check(PIRATE, "--model", DEMO_BASE)
    assert (spoken.exit_code, "4 of rank 8" in spoken.stdout) == (0, True)


def test_invocation_tokens_are_shown(adapter: Path) -> None:
    assert checked(adapter, "--model", DEMO_BASE)["facts"]["invocation_tokens"] is None
    rewrite("adapter_config.json", alora_invocation_tokens=[300, 301])(adapter)
    assert checked(adapter, "--model", DEMO_BASE)["facts"]["invocation_tokens"] == [300, 301]
    assert "300, 301" in check(adapter, "--model", DEMO_BASE).stdout
    rewrite("adapter_config.json", alora_invocation_tokens=[300, 1024])(adapter)
    [problem] = checked(adapter, "--model", DEMO_BASE)["problems"]
    assert (problem["code"], problem["param"]) == ("base_mismatch", "alora_invocation_tokens[1]")


def test_dtype_changes_the_size_of_a_page() -> None:
    bfloat16, float32 = (checked(DEMO_BASE, "--dtype", dtype)["facts"] for dtype in ("bfloat16", "float32"))
    assert float32["page_bytes"] == 2 * bfloat16["page_bytes"]
    assert check(DEMO_BASE, "--dtype", "int8").exit_code == 2


def test_pages_of_a_sequences_state_are_reported(tmp_path: Path) -> None:
    assert checked(DEMO_BASE)["facts"]["state_pages"] == 0
    hybrid = {**json.loads((DEMO_BASE / "config.json").read_text()), "architectures": ["Qwen3_5ForCausalLM"]}
    hybrid |= {"num_hidden_layers": 4, "num_key_value_heads": 2, "head_dim": 256}
    (tmp_path / "config.json").write_text(json.dumps(hybrid))
    facts = checked(tmp_path)["facts"]
    elements = 3 * (32 * 128 * 128 + 3 * (2 * 16 + 32) * 128)
    assert (facts["page_bytes"], facts["state_pages"]) == (4 * 32768, -(-elements * 4 // (4 * 32768)))


def without_tensor(base: Path) -> None:
    tensors = load_file(base / "model.safetensors")
    save_file({name: tensors[name] for name in tensors if name != "model.norm.weight"}, base / "model.safetensors")


def rewrite(name: str, **changes: Any) -> Callable[[Path], None]:
    def apply(base: Path) -> None:
        path = base / name
        path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))

    return apply


@pytest.mark.parametrize(
    ("damage", "code", "says"),
    [
        (lambda base: (base / "config.json").unlink(), "model_not_supported", "has no config.json"),
        (rewrite("config.json", architectures=["MambaForCausalLM"]), "model_not_supported", "MambaForCausalLM"),
        (rewrite("config.json", quantization_config={"bits": 4}), "model_not_supported", "quantization_config"),
        (rewrite("config.json", vocab_size=1000), "model_not_supported", "config.json says [1000, 256]"),
        (lambda base: (base / "model.safetensors").unlink(), "model_not_supported", "model.safetensors"),
        (without_tensor, "model_not_supported", "no tensor model.norm.weight"),
        (lambda base: (base / "tokenizer.json").unlink(), "model_files_not_usable", "fast tokenizer"),
        (rewrite("tokenizer_config.json", chat_template="{% if"), "model_files_not_usable", "malformed"),
        (rewrite("generation_config.json", temperature=-1), "invalid_generation_config", "--generation-config off"),
    ],
)
def test_one_fault_of_a_base_is_named(base: Path, damage: Callable[[Path], None], code: str, says: str) -> None:
    damage(base)
    (problem,) = checked(base)["problems"]
    assert problem["code"] == code
    assert says in problem["message"]
    assert f"{base} would not be served" in check(base).stdout


def test_a_file_of_a_base_is_not_said_to_be_missing(base: Path) -> None:
    (problem,) = checked(base / "config.json")["problems"]
    assert "config.json is a file" in problem["message"]
    assert problem["param"] is None


def test_several_faults_of_a_base_are_all_named(base: Path) -> None:
    for name in ("model.safetensors", "tokenizer.json"):
        (base / name).unlink()
    assert [problem["param"] for problem in checked(base)["problems"]] == ["model.safetensors", "tokenizer.json"]


@pytest.mark.parametrize(
    ("template", "warning"),
    [
        (None, "no_chat_template"),
        ("{{ raise_exception('no') }}", "chat_template_refused"),
        ("{{ messages[0].content }} {{ tools and tools[0].function.name }}", "no_tool_parser"),
    ],
)
def test_template_that_limits_chat_is_a_warning(base: Path, template: str | None, warning: str) -> None:
    (base / "chat_template.jinja").unlink(missing_ok=True)
    rewrite("tokenizer_config.json", chat_template=template)(base)
    document = checked(base)
    assert (document["served"], [found["code"] for found in document["warnings"]]) == (True, [warning])


def poison(adapter: Path) -> None:
    tensors = load_file(adapter / "adapter_model.safetensors")
    tensors[min(tensors)][0, 0] = torch.nan
    save_file(tensors, adapter / "adapter_model.safetensors")


@pytest.mark.parametrize(
    ("damage", "code"),
    [
        (rewrite("adapter_config.json", use_qalora=True), "unsupported_config"),
        (rewrite("adapter_config.json", r=4), "rank_mismatch"),
        (lambda adapter: (adapter / "adapter_model.safetensors").write_bytes(b"PK" + bytes(20)), "archive_not_allowed"),
        (lambda adapter: (adapter / "adapter_model.safetensors").write_bytes(b""), "invalid_size"),
        (lambda adapter: (adapter / "adapter_model.safetensors").unlink(), "file_missing"),
        (lambda adapter: (adapter / "adapter_config.json").write_bytes(b" " * ((1 << 20) + 1)), "file_too_large"),
        (lambda adapter: (adapter / "chat_template.jinja").write_text("{% if"), "invalid_template"),
        (lambda adapter: (adapter / "parsers.json").write_text('{"tool_call_parser": "x"}'), "invalid_parsers"),
        (poison, "not_finite"),
    ],
)
def test_fault_of_an_adapter_has_the_code_of_an_upload(
    adapter: Path, damage: Callable[[Path], None], code: str
) -> None:
    damage(adapter)
    (problem,) = checked(adapter, "--model", DEMO_BASE)["problems"]
    assert problem["code"] == code


def test_adapter_of_another_base_is_refused(base: Path) -> None:
    rewrite("config.json", num_hidden_layers=3)(base)
    (problem,) = checked(PIRATE, "--model", base)["problems"]
    assert (problem["code"], "3 layers" in problem["message"]) == ("base_mismatch", True)
    rewrite("config.json", num_hidden_layers=0)(base)
    (problem,) = checked(PIRATE, "--model", base)["problems"]
    assert problem["code"] == "model_not_supported"


def test_files_of_a_download_cache_are_links(adapter: Path, tmp_path: Path) -> None:
    linked = tmp_path / "snapshot"
    linked.mkdir()
    for path in adapter.iterdir():
        (linked / path.name).symlink_to(path)
    assert checked(linked, "--model", DEMO_BASE)["served"]


def test_an_adapter_of_mlx_is_converted(tmp_path: Path) -> None:
    tensors = load_file(PIRATE / "adapter_model.safetensors")
    files = AdapterFiles(json.loads((PIRATE / "adapter_config.json").read_text()))
    files.tensors = {name: values.float().numpy() for name, values in tensors.items()}
    directory = write_mlx(tmp_path / "mlx", files)
    shutil.copy(TOOLS / "adapters/concierge/chat_template.jinja", directory)
    facts = checked(directory, "--model", DEMO_BASE)["facts"]
    assert (facts["max_rank"], facts["chat_template"] is not None) == (files.config["r"], True)
    (directory / "adapters.safetensors").write_bytes(b"")
    [problem] = checked(directory, "--model", DEMO_BASE)["problems"]
    assert problem["code"] == "truncated_file"


def test_experts_of_mlx_are_compared_with_the_base(tmp_path: Path, base: Path) -> None:
    tensors = expert_tensors("model.layers.0.mlp.switch_mlp", {"up_proj": (64, 32)}, num_experts=4, rank=2)
    directory = write_tensors(tmp_path / "mlx", tensors, rank=2, scale=2.0)
    [problem] = checked(directory, "--model", DEMO_BASE)["problems"]
    assert (problem["code"], problem["message"]) == (
        "base_mismatch",
        "the adapter has LoRAs of 4 experts, but the base has no experts",
    )
    (base / "config.json").write_text("{}")
    [problem] = checked(directory, "--model", base)["problems"]
    assert problem["code"] == "model_not_supported"


def test_adapter_needs_a_base() -> None:
    result = check(PIRATE)
    assert (result.exit_code, "--model" in result.stderr) == (2, True)


def test_nothing_imports_torch(tmp_path: Path) -> None:
    program = (
        "import sys\nfrom loramux.admin.check.adapter_check import check_adapter\n"
        "from loramux.admin.check.base_check import check_base\n"
        "from pathlib import Path\n"
        "assert check_base(Path(sys.argv[1])).is_served\n"
        "assert check_adapter(Path(sys.argv[2]), Path(sys.argv[1])).is_served\n"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program, str(DEMO_BASE), str(PIRATE)], check=True, timeout=60)


QWEN3_MOE = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "num_hidden_layers": 2,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "mlp_only_layers": [0],
    "vocab_size": 70,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
}


def test_modules_of_experts_are_listed_once_for_all_experts(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(QWEN3_MOE))
    experts = [name for name in checked(tmp_path)["facts"]["adapter_modules"] if "expert" in name]
    assert experts == [
        *(f"mlp.experts.*.{name}_proj" for name in ("gate", "up", "down")),
        *(f"mlp.experts.{name}_proj" for name in ("gate_up", "down")),
    ]


def test_an_adapter_of_stacked_experts_is_accepted(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(QWEN3_MOE))
    files = stacked_files(rank=3)
    directory = tmp_path / "adapter"
    directory.mkdir()
    (directory / "adapter_config.json").write_bytes(files.config_bytes)
    (directory / "adapter_model.safetensors").write_bytes(files.tensor_bytes)
    document = checked(directory, "--model", tmp_path)
    assert document["served"], document
    assert document["facts"]["max_rank"] == 3


PARTS = "{% for message in messages %}{% for part in message.content %}{{ part.text }}{% endfor %}{% endfor %}"


def test_templates_that_read_lists_of_parts_are_served(base: Path, adapter: Path) -> None:
    (base / "chat_template.jinja").write_text(PARTS)
    document = checked(base)
    assert (document["facts"]["chat_template"], document["warnings"]) == (True, [])
    (adapter / "chat_template.jinja").write_text(PARTS)
    assert checked(adapter, "--model", DEMO_BASE)["facts"]["chat_template"]["size"] == len(PARTS)


def test_a_copy_of_the_bases_tokenizer_and_template_adds_nothing(adapter: Path) -> None:
    before = checked(adapter, "--model", DEMO_BASE)["facts"]
    template = json.loads((DEMO_BASE / "tokenizer_config.json").read_text())["chat_template"]
    for name in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"):
        shutil.copy(DEMO_BASE / name, adapter / name)
    assert checked(adapter, "--model", DEMO_BASE)["facts"] == before
    (adapter / "chat_template.jinja").write_text(template + "\n")
    assert checked(adapter, "--model", DEMO_BASE)["facts"] == before


def test_facts_of_an_adapters_tokenizer_are_checked_as_a_push_checks_them(adapter: Path) -> None:
    document = json.loads((DEMO_BASE / "tokenizer.json").read_text())
    spare = next(token for token in document["added_tokens"] if token["content"] == "<|system|>")
    spare["content"] = "<|tool|>"
    (adapter / "tokenizer.json").write_text(json.dumps(document))
    (adapter / "tokenizer_config.json").write_text(json.dumps({"chat_template": PARTS, "eos_token": "<|tool|>"}))
    facts = checked(adapter, "--model", DEMO_BASE)["facts"]
    assert facts["added_vocabulary"]["renamed"] == {"<|tool|>": spare["id"]}
    assert facts["added_vocabulary"]["special_tokens"] == {"eos_token": "<|tool|>"}
    assert facts["chat_template"]["size"] == len(PARTS)
    first, second = [name for name in document["model"]["vocab"] if len(name) == 1][:2]
    vocabulary = document["model"]["vocab"]
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    (adapter / "tokenizer.json").write_text(json.dumps(document))
    [problem] = checked(adapter, "--model", DEMO_BASE)["problems"]
    assert (problem["code"], problem["param"]) == ("tokenizer_mismatch", "tokenizer.json")


def test_end_tokens_and_settings_without_effect_are_shown(adapter: Path) -> None:
    path = adapter / "generation_config.json"
    path.write_text(json.dumps({"eos_token_id": [301, 1], "no_repeat_ngram_size": 3}))
    document = checked(adapter, "--model", DEMO_BASE)
    assert document["facts"]["generation_config"] == {"eos_token_id": [301, 1]}
    assert [(one["code"], one["params"]) for one in document["warnings"]] == [
        ("generation_settings_ignored", ["no_repeat_ngram_size"])
    ]
    path.write_text(json.dumps({"eos_token_id": [301, 1024]}))
    [problem] = checked(adapter, "--model", DEMO_BASE)["problems"]
    assert (problem["code"], problem["param"]) == ("invalid_generation_config", "eos_token_id")


def test_added_tokens_are_checked_against_the_bases_tokenizer(adapter: Path) -> None:
    flags = dict.fromkeys(("special", "lstrip", "rstrip", "single_word", "normalized"), False)
    for content, vocab_size, code, param in (
        ("<|assistant|>", 1025, "token_collision", "tokens[0].content"),
        ("<|check|>", 1024, "invalid_vocabulary", "tokens[0].id"),
        ("<|check|>", 1025, "token_mismatch", "vocab_size"),
    ):
        document = {"vocab_size": vocab_size, "tokens": [{"id": 1024, "content": content, **flags}]}
        (adapter / "added_vocabulary.json").write_text(json.dumps(document))
        [problem] = checked(adapter, "--model", DEMO_BASE)["problems"]
        assert (problem["code"], problem["param"]) == (code, param)
    (adapter / "added_vocabulary.json").unlink()
    tokenizer = json.loads((DEMO_BASE / "tokenizer.json").read_text())
    tokenizer["added_tokens"].append({"id": 1024, "content": "[PAD]", **flags})
    (adapter / "tokenizer.json").write_text(json.dumps(tokenizer))
    assert "added_vocabulary" not in checked(adapter, "--model", DEMO_BASE)["facts"]
