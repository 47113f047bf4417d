from __future__ import annotations

import json
from typing import Any

import pytest

from loramux.adapter_store.errors import AdapterRejected
from loramux.adapter_store.validation.peft_config import parse_peft_config

GOOD = {"peft_type": "LORA", "r": 8, "lora_alpha": 16, "target_modules": ["q_proj", "v_proj"]}


def parse(**changes: Any) -> Any:
    return parse_peft_config(json.dumps({**GOOD, **changes}).encode())


def test_settings_that_change_the_result_are_read() -> None:
    config = parse(
        use_rslora=True, rank_pattern={"q_proj": 2}, alpha_pattern={"v_proj": 3.5}, layers_to_transform=1, revision="x"
    )
    assert (config.rank, config.alpha, config.use_rslora) == (8, 16.0, True)
    assert config.target_modules == ("q_proj", "v_proj")
    assert config.rank_pattern == (("q_proj", 2),)
    assert config.alpha_pattern == (("v_proj", 3.5),)
    assert config.layers == (1,)
    assert config.recorded["revision"] == "x"
    assert config.invocation_tokens == ()


@pytest.mark.parametrize("tokens", [[0], [5, 5], list(range(256))], ids=["one", "twice the same", "256"])
def test_invocation_tokens_are_read(tokens: list[int]) -> None:
    assert parse(alora_invocation_tokens=tokens, task_type="CAUSAL_LM").invocation_tokens == tuple(tokens)


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"target_modules": "all-linear"}, id="all-linear"),
        pytest.param({"base_model_name_or_path": "any/other", "revision": None}, id="another base's name"),
        pytest.param({"lora_dropout": 0.1, "inference_mode": True, "peft_version": "0.21.2"}, id="training facts"),
        pytest.param({"use_dora": False, "bias": "none", "modules_to_save": None, "loftq_config": {}}, id="left off"),
        pytest.param({"exclude_modules": ["lm_head"], "layers_pattern": None}, id="exclusions"),
        pytest.param({"auto_mapping": {"base_model_class": "LlamaForCausalLM"}, "task_type": None}, id="no task type"),
        pytest.param({"task_type": "SEQ_CLS"}, id="another task without a head"),
        pytest.param(
            {"swift_type": "LORA", "lora_dtype": "AUTO", "lorap_lr_ratio": 16.0, "lorap_emb_lr": 1e-6},
            id="ms-swift's LoRA",
        ),
        pytest.param({"fan_in_fan_out": True}, id="transposed weights"),
        pytest.param({"init_lora_weights": "eva", "eva_config": {"rho": 2.0}}, id="EVA"),
        pytest.param({"enable_lora": None, "merge_weights": False}, id="keys of the first versions of peft"),
        pytest.param({"init_lora_weights": None}, id="no initialisation"),
        pytest.param({"init_lora_weights": "mica"}, id="MiCA"),
        pytest.param({"init_lora_weights": "Gaussian"}, id="an initialisation in capitals"),
        pytest.param({"velora_config": {"num_groups": 64, "scale": 1.0}}, id="VeLoRA"),
        pytest.param({"monteclora_config": {"num_samples": 8}}, id="MonteCLoRA"),
        pytest.param({"runtime_config": {"ephemeral_gpu_offload": True}}, id="runtime settings"),
        pytest.param({"loftq_config": {"loftq_bits": 4}, "init_lora_weights": True}, id="LoftQ that was not used"),
        pytest.param({"corda_config": {"corda_method": "ipm"}}, id="CorDA that was not used"),
        pytest.param({"lora_ga_config": {"direction": "ArB2r"}}, id="LoRA-GA that was not used"),
        pytest.param({"bias": "all"}, id="trained biases"),
        pytest.param({"bias": "lora_only"}, id="trained biases of adapted modules"),
        pytest.param({"use_qalora": False, "use_bdlora": None, "kasa_config": None, "arrow_config": {}}, id="off"),
        pytest.param({"alpha_pattern": {r".*\.layers\.1\..*(q_proj|k_proj)$": 4}}, id="an expression for alpha"),
        *(
            pytest.param({"option_of_the_next_release": value}, id=f"unknown key {value!r}")
            for value in (None, False, 0, 0.0, "", [], {})
        ),
    ],
)
def test_neutral_values_are_accepted(changes: dict[str, Any]) -> None:
    parse(**changes)


@pytest.mark.parametrize(
    ("changes", "code", "param"),
    [
        pytest.param({"r": 0}, "rank_out_of_range", "r", id="rank 0"),
        pytest.param({"r": -1}, "rank_out_of_range", "r", id="negative rank"),
        pytest.param({"r": 257}, "rank_out_of_range", "r", id="rank 257"),
        pytest.param({"r": 10**5000}, "invalid_json", "adapter_config.json", id="rank of 5000 digits"),
        pytest.param({"r": 8.0}, "invalid_config", "r", id="rank as float"),
        pytest.param({"r": True}, "invalid_config", "r", id="rank as bool"),
        pytest.param({"r": "8"}, "invalid_config", "r", id="rank as text"),
        pytest.param({"r": None}, "invalid_config", "r", id="no rank"),
        pytest.param({"rank_pattern": {"q_proj": 0}}, "rank_out_of_range", "rank_pattern.q_proj", id="pattern rank 0"),
        pytest.param({"rank_pattern": {".*q": 0}}, "rank_out_of_range", "rank_pattern..*q", id="rank 0 of a regex"),
        pytest.param({"rank_pattern": ["q_proj"]}, "invalid_config", "rank_pattern", id="pattern as list"),
        pytest.param({"alpha_pattern": {"q_proj": "1"}}, "invalid_config", "alpha_pattern.q_proj", id="alpha as text"),
        pytest.param({"lora_alpha": 0}, "alpha_out_of_range", "lora_alpha", id="alpha 0"),
        pytest.param({"lora_alpha": -1}, "alpha_out_of_range", "lora_alpha", id="negative alpha"),
        pytest.param({"lora_alpha": 1e9}, "alpha_out_of_range", "lora_alpha", id="huge alpha"),
        pytest.param({"lora_alpha": float("nan")}, "invalid_json", "adapter_config.json", id="NaN alpha"),
        pytest.param({"lora_alpha": None}, "invalid_config", "lora_alpha", id="no alpha"),
        pytest.param({"peft_type": "IA3"}, "unsupported_config", "peft_type", id="not LoRA"),
        pytest.param({"use_dora": True, "lora_bias": True}, "unsupported_config", "lora_bias", id="DoRA with bias"),
        pytest.param({"bias": "some"}, "unsupported_config", "bias", id="bias"),
        pytest.param({"lora_bias": 1}, "invalid_config", "lora_bias", id="LoRA bias as number"),
        pytest.param({"modules_to_save": [1]}, "invalid_config", "modules_to_save", id="saved number"),
        pytest.param({"auto_mapping": ["a"]}, "invalid_config", "auto_mapping", id="auto mapping as list"),
        pytest.param({"fan_in_fan_out": 1}, "invalid_config", "fan_in_fan_out", id="transposed weights as number"),
        pytest.param({"layers_pattern": [1]}, "invalid_config", "layers_pattern", id="pattern of layers as number"),
        *(
            pytest.param({"init_lora_weights": name}, "unsupported_config", "init_lora_weights", id=f"{name} weights")
            for name in ("pissa", "pissa_niter_16", "olora", "loftq", "corda", "lora_ga", "new")
        ),
        pytest.param({"init_lora_weights": "LoftQ"}, "unsupported_config", "init_lora_weights", id="LoftQ in capitals"),
        *(
            pytest.param({"task_type": task, "modules_to_save": [head]}, "unsupported_config", "task_type", id=task)
            for task, head in (("TOKEN_CLS", "classifier"), ("QUESTION_ANS", "qa_outputs"))
        ),
        pytest.param({"swift_type": "ADAPTER"}, "unsupported_config", "swift_type", id="another tuner of ms-swift"),
        pytest.param({"lora_dtype": 16}, "invalid_config", "lora_dtype", id="dtype as number"),
        pytest.param({"lorap_lr_ratio": "16"}, "invalid_config", "lorap_lr_ratio", id="learning rate as text"),
        pytest.param({"eva_config": [2.0]}, "invalid_config", "eva_config", id="EVA as list"),
        pytest.param({"velora_config": True}, "invalid_config", "velora_config", id="VeLoRA as switch"),
        pytest.param({"kasa_config": {"beta": 1e-4}}, "unsupported_config", "kasa_config", id="KaSA"),
        pytest.param({"arrow_config": {"top_k": 3}}, "unsupported_config", "arrow_config", id="Arrow"),
        pytest.param({"use_bdlora": {"nblocks": 2}}, "unsupported_config", "use_bdlora", id="BD-LoRA"),
        pytest.param({"use_qalora": True}, "unsupported_config", "use_qalora", id="QALoRA"),
        pytest.param({"layer_replication": [[0, 2]]}, "unsupported_config", "layer_replication", id="replication"),
        pytest.param({"target_parameters": "w"}, "invalid_config", "target_parameters", id="parameters as text"),
        pytest.param({"trainable_token_indices": 1}, "invalid_config", "trainable_token_indices", id="one token"),
        pytest.param({"target_modules": ""}, "invalid_config", "target_modules", id="empty regex"),
        pytest.param({"target_modules": []}, "invalid_config", "target_modules", id="no target"),
        pytest.param({"target_modules": [1]}, "invalid_config", "target_modules", id="target as number"),
        pytest.param({"target_modules": None}, "invalid_config", "target_modules", id="targets missing"),
        pytest.param({"layers_to_transform": [-1]}, "invalid_config", "layers_to_transform", id="negative layer"),
        pytest.param({"layers_to_transform": "0"}, "invalid_config", "layers_to_transform", id="layer as text"),
        pytest.param({"use_rslora": 1}, "invalid_config", "use_rslora", id="rsLoRA as number"),
        pytest.param({"revision": {"a": 1}}, "invalid_config", "revision", id="revision as object"),
        *(
            pytest.param({"new_feature": value}, "unknown_config_key", "new_feature", id=f"unknown key {value!r}")
            for value in (1, True, 0.5, "none", [0], {"a": None}, [None])
        ),
    ],
)
def test_invalid_configuration_is_refused(changes: dict[str, Any], code: str, param: str) -> None:
    text = json.dumps({**GOOD, **{key: value for key, value in changes.items() if value != 10**5000}})
    if changes.get("r") == 10**5000:
        text = text.replace('"r": 8', '"r": ' + "1" * 5001)
    with pytest.raises(AdapterRejected) as refused:
        parse_peft_config(text.encode())
    assert (refused.value.code, refused.value.param) == (code, param)


@pytest.mark.parametrize(
    ("text", "code"),
    [
        pytest.param(b"", "invalid_json", id="empty"),
        pytest.param(b"[]", "invalid_json", id="not an object"),
        pytest.param(b"{", "invalid_json", id="cut off"),
        pytest.param(b"\xff\xfe{}", "invalid_json", id="not UTF-8"),
        pytest.param(b'{"r": Infinity}', "invalid_json", id="infinity"),
        pytest.param(b'{"r": 1e999}', "invalid_json", id="beyond a double"),
        pytest.param(b"[" * 200_000, "invalid_json", id="deep nesting"),
        pytest.param(b'{"r": 8, "r": 4}', "duplicate_key", id="duplicate key"),
        pytest.param(b'{"rank_pattern": {"a": 1, "a": 2}}', "duplicate_key", id="duplicate key inside"),
        pytest.param(b'{"r": "' + b"x" * (1 << 20) + b'"}', "config_too_large", id="too large"),
        pytest.param(b"{}", "invalid_config", id="nothing in it"),
    ],
)
def test_invalid_json_is_refused(text: bytes, code: str) -> None:
    with pytest.raises(AdapterRejected) as refused:
        parse_peft_config(text)
    assert refused.value.code == code


@pytest.mark.parametrize(
    "text",
    [
        pytest.param(r'"base_model_name_or_path": "\ud800"', id="high half"),
        pytest.param(r'"base_model_name_or_path": "\uDC00\ud83d"', id="halves the wrong way round"),
        pytest.param(r'"rank_pattern": {"\udfff": 4}', id="in a key"),
    ],
)
def test_lone_surrogate_is_refused(text: str) -> None:
    """The stored configuration is later returned as UTF-8, which cannot encode a lone surrogate."""
    with pytest.raises(AdapterRejected) as refused:
        parse_peft_config(json.dumps(GOOD)[:-1].encode() + b", " + text.encode() + b"}")
    assert (refused.value.code, refused.value.param) == ("invalid_json", "adapter_config.json")


def test_surrogate_pair_is_accepted() -> None:
    text = json.dumps(GOOD)[:-1].encode() + rb', "base_model_name_or_path": "\uD83D\ude00"}'
    assert parse_peft_config(text).recorded["base_model_name_or_path"] == "\U0001f600"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"lora_alpha": None}, "lora_alpha is missing or null: set it to the alpha used in training"),
        ({"lora_alpha": [16]}, "alpha must be a number, not a list"),
        ({"r": None}, "r is missing or null: set it to the rank used in training"),
        ({"r": 8.5}, "a rank must be an integer, not 8.5"),
        ({"rank_pattern": {"q_proj": None}}, "rank_pattern.q_proj is missing or null"),
        ({"use_dora": "yes"}, "use_dora must be true or false, not a text"),
        ({"layer_replication": [[0, 4]]}, "layer_replication is not supported: it must be null or [] or {} or false"),
        ({"inference_mode": 1}, "inference_mode is 1, which has the wrong type"),
    ],
    ids=repr,
)
def test_error_says_what_was_found_and_what_to_do(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(AdapterRejected) as caught:
        parse(**changes)
    assert message in caught.value.message


def test_keys_that_are_left_out_are_named() -> None:
    for key, message in (("lora_alpha", "lora_alpha is missing"), ("peft_type", 'set it to "LORA"')):
        document = {name: value for name, value in GOOD.items() if name != key}
        with pytest.raises(AdapterRejected, match=message) as caught:
            parse_peft_config(json.dumps(document).encode())
        assert caught.value.param == key


def test_another_method_is_named_before_its_own_keys() -> None:
    """PEFT writes the keys in alphabetical order."""
    ia3 = {"feedforward_modules": ["down_proj"], **GOOD, "peft_type": "IA3"}
    with pytest.raises(AdapterRejected, match="the adapter is not a LoRA") as caught:
        parse_peft_config(json.dumps(ia3).encode())
    assert (caught.value.code, caught.value.param) == ("unsupported_config", "peft_type")
