from __future__ import annotations

import json
from functools import partial
from typing import Any

import numpy as np

from tests.adapter_store.adapter_files import AdapterFiles, tensor_name
from tests.adapter_store.validation.hostile import CONFIG, MARK, Q_A, Hostile, good_files


def _config(name: str, code: str, param: str, **changes: Any) -> Hostile:
    return Hostile(name=name, code=code, param=param, change=lambda files: files.config.update(changes))


def _without(key: str, code: str = "invalid_config") -> Hostile:
    return Hostile(name=f"no {key}", code=code, param=key, change=lambda files: files.config.pop(key))


def _text(name: str, code: str, config: bytes, param: str = CONFIG) -> Hostile:
    return Hostile(name=name, code=code, param=param, config=config)


def _spelt(name: str, code: str, members: str, param: str = CONFIG) -> Hostile:
    """Add members to a valid configuration, spelled exactly as given."""
    return _text(name, code, json.dumps(good_files().config)[:-1].encode() + b", " + members.encode() + b"}", param)


Q_BIAS = Q_A.replace("lora_A.weight", "base_layer.bias")


def _with_bias(files: AdapterFiles) -> None:
    files.config["bias"] = "all"
    files.tensors[Q_BIAS] = np.ones(32, np.float32)


def _with_c_attn(files: AdapterFiles, **config: Any) -> None:
    files.config |= config
    for half, shape in (("A", (4, 32)), ("B", (32, 4))):
        files.tensors[tensor_name(0, "attn.c_attn", half)] = np.ones(shape, np.float32)


_SLOW = r"(\w*.?)*!"
_INVOCATION = "alora_invocation_tokens"
_INVOKED = {_INVOCATION: [1, 2]}

TEXTS = [
    _text("configuration of spaces", "invalid_json", b"   "),
    _text("configuration is a list", "invalid_json", b"[]"),
    _text("configuration is null", "invalid_json", b"null"),
    _text("configuration is a text", "invalid_json", json.dumps(MARK).encode()),
    _text("configuration cut off", "invalid_json", b'{"r": 4'),
    _text(
        "configuration with a byte order mark",
        "invalid_json",
        b"\xef\xbb\xbf" + json.dumps(good_files().config).encode(),
    ),
    _text("configuration in UTF-16", "invalid_json", json.dumps(good_files().config).encode("utf-16")),
    _text("configuration in Latin-1", "invalid_json", '{"base_model_name_or_path": "é"}'.encode("latin-1")),
    _text("configuration with overlong bytes", "invalid_json", b'{"base_model_name_or_path": "\xc0\xaf"}'),
    _text("configuration with a NUL byte", "invalid_json", b'{"r": 4}\x00'),
    _text("configuration in YAML", "invalid_json", f"r: 4\nname: {MARK}\n".encode()),
    _text("configuration is a pickle", "invalid_json", b"\x80\x04}\x94."),
    _text("two configurations", "invalid_json", json.dumps(good_files().config).encode() * 2),
    _text("configuration 200000 lists deep", "invalid_json", b"[" * 200_000),
    _text("configuration 100000 objects deep", "invalid_json", b'{"r":' * 100_000),
    _text("configuration of over a megabyte", "config_too_large", b'{"r": "' + b"x" * (1 << 20) + b'"}'),
    _text("empty object", "invalid_config", b"{}", "peft_type"),
    _spelt("NaN as a value", "invalid_json", '"lora_dropout": NaN'),
    _spelt("infinity as a value", "invalid_json", '"lora_dropout": Infinity'),
    _spelt("minus infinity as a value", "invalid_json", '"lora_dropout": -Infinity'),
    _spelt("value beyond a double", "invalid_json", '"lora_dropout": 1e400'),
    _spelt("integer of 5000 digits", "invalid_json", '"qalora_group_size": ' + "9" * 5000),
    _spelt("group size of minus zero", "invalid_config", '"qalora_group_size": -0', "qalora_group_size"),
    _spelt("rank given twice", "duplicate_key", '"r": 8', "r"),
    _spelt("rank given twice, once escaped", "duplicate_key", '"\\u0072": 8', "r"),
    _spelt("pattern given twice", "duplicate_key", '"rank_pattern": {"kilroy": 1, "kilroy": 2}', MARK),
    _spelt("half a character", "invalid_json", '"revision": "\\ud800kilroy"'),
    _spelt("line break in a text", "invalid_json", '"base_model_name_or_path": "kil\nroy"'),
    _spelt("comment", "invalid_json", "// kilroy\n"),
]

TYPES = [
    _without("peft_type"),
    _without("r"),
    _without("lora_alpha"),
    _without("target_modules"),
    _config("rank is a float", "invalid_config", "r", r=4.0),
    _config("rank is a truth", "invalid_config", "r", r=True),
    _config("rank is a text", "invalid_config", "r", r="4"),
    _config("rank is a list", "invalid_config", "r", r=[4]),
    _config("rank is null", "invalid_config", "r", r=None),
    _config("alpha is a text", "invalid_config", "lora_alpha", lora_alpha="8"),
    _config("alpha is a truth", "invalid_config", "lora_alpha", lora_alpha=True),
    _config("targets are a number", "invalid_config", "target_modules", target_modules=7),
    _config("targets are an object", "invalid_config", "target_modules", target_modules={"q_proj": 1}),
    _config("target is a number", "invalid_config", "target_modules", target_modules=["q_proj", 1]),
    _config("target is a list", "invalid_config", "target_modules", target_modules=[["q_proj"]]),
    _config("no targets", "invalid_config", "target_modules", target_modules=[]),
    _config("exclusion is a number", "invalid_config", "exclude_modules", exclude_modules=0),
    _config("exclusion is an object", "invalid_config", "exclude_modules", exclude_modules={}),
    _config("ranks are a list", "invalid_config", "rank_pattern", rank_pattern=["q_proj"]),
    _config("pattern rank is a text", "invalid_config", "rank_pattern.q_proj", rank_pattern={"q_proj": MARK}),
    _config("pattern alpha is a list", "invalid_config", "alpha_pattern.q_proj", alpha_pattern={"q_proj": [1]}),
    _config("rsLoRA is a number", "invalid_config", "use_rslora", use_rslora=1),
    _config("rsLoRA is a text", "invalid_config", "use_rslora", use_rslora="false"),
    _config("layer is a text", "invalid_config", "layers_to_transform", layers_to_transform=["0"]),
    _config("layer is a truth", "invalid_config", "layers_to_transform", layers_to_transform=[True]),
    _config("layers are an object", "invalid_config", "layers_to_transform", layers_to_transform={"0": 1}),
    _config("base's name is an object", "invalid_config", "base_model_name_or_path", base_model_name_or_path={MARK: 1}),
    _config("revision is a number", "invalid_config", "revision", revision=7),
    _config("task is a list", "invalid_config", "task_type", task_type=[MARK]),
    _config("dropout is a text", "invalid_config", "lora_dropout", lora_dropout=MARK),
    _config("inference mode is a number", "invalid_config", "inference_mode", inference_mode=0),
    *(
        _config(f"invocation tokens are {name}", "invalid_config", _INVOCATION, alora_invocation_tokens=value)
        for name, value in {
            "an empty list": [],
            "an empty object": {},
            "a truth": False,
            "a number": 1,
            "a text": MARK,
            "an object": {MARK: 1},
            "texts": [MARK],
            "floats": [1.0],
            "truths": [True],
            "null in a list": [None],
            "lists": [[1]],
        }.items()
    ),
    _config("bias is a number", "unsupported_config", "bias", bias=1),
    _config("DoRA is a number", "invalid_config", "use_dora", use_dora=0),
]

RANGES = [
    _config("rank 0", "rank_out_of_range", "r", r=0),
    _config("rank -1", "rank_out_of_range", "r", r=-1),
    _config("rank 257", "rank_out_of_range", "r", r=257),
    _config("rank 2**63", "rank_out_of_range", "r", r=2**63),
    _config("rank of 300 digits", "rank_out_of_range", "r", r=10**299),
    _config("pattern rank 0", "rank_out_of_range", "rank_pattern.q_proj", rank_pattern={"q_proj": 0}),
    _config("pattern rank 257", "rank_out_of_range", "rank_pattern.q_proj", rank_pattern={"q_proj": 257}),
    _config("alpha 0", "alpha_out_of_range", "lora_alpha", lora_alpha=0),
    _config("alpha -0.0", "alpha_out_of_range", "lora_alpha", lora_alpha=-0.0),
    _config("alpha -8", "alpha_out_of_range", "lora_alpha", lora_alpha=-8),
    _config("alpha 1e308", "alpha_out_of_range", "lora_alpha", lora_alpha=1e308),
    _config("alpha of 300 digits", "alpha_out_of_range", "lora_alpha", lora_alpha=10**299),
    _config("pattern alpha 0", "alpha_out_of_range", "alpha_pattern.v_proj", alpha_pattern={"v_proj": 0.0}),
    _config("layer -1", "invalid_config", "layers_to_transform", layers_to_transform=[-1]),
    _config("layer 2 of 2", "base_mismatch", "layers_to_transform", layers_to_transform=[0, 2]),
    _config("layer of 300 digits", "base_mismatch", "layers_to_transform", layers_to_transform=10**299),
    _config("invocation token -1", "invalid_config", _INVOCATION, alora_invocation_tokens=[1, -1]),
    _config("invocation token 70 of 70", "base_mismatch", f"{_INVOCATION}[1]", alora_invocation_tokens=[69, 70]),
    _config("invocation token 2**31", "invalid_config", _INVOCATION, alora_invocation_tokens=[2**31]),
    _config("invocation token of 300 digits", "invalid_config", _INVOCATION, alora_invocation_tokens=[10**299]),
    _config("257 invocation tokens", "invalid_config", _INVOCATION, alora_invocation_tokens=[1] * 257),
    _config("100000 invocation tokens", "invalid_config", _INVOCATION, alora_invocation_tokens=[1] * 100_000),
    _config("4097 targets", "invalid_config", "target_modules", target_modules=["q_proj"] * 4097),
    _config("4097 ranks", "invalid_config", "rank_pattern", rank_pattern={f"kilroy{i}": 4 for i in range(4097)}),
]

UNSUPPORTED = [
    _config("another method", "unsupported_config", "peft_type", peft_type="IA3"),
    _config("method in lower case", "unsupported_config", "peft_type", peft_type="lora"),
    _config("DoRA with a bias", "unsupported_config", "lora_bias", use_dora=True, lora_bias=True),
    _config("bias of some modules", "unsupported_config", "bias", bias="lora-only"),
    Hostile(name="biases that the base lacks", code="unexpected_tensor", param=Q_BIAS, change=_with_bias),
    _config("bias of another method", "unsupported_config", "bias", bias="boft_only"),
    _config("bias is text", "invalid_config", "lora_bias", lora_bias="true"),
    _config("auto mapping", "invalid_config", "auto_mapping", auto_mapping=[MARK]),
    _config("transposed weights", "invalid_config", "fan_in_fan_out", fan_in_fan_out=MARK),
    _config("PiSSA", "unsupported_config", "init_lora_weights", init_lora_weights="pissa"),
    _config("OLoRA", "unsupported_config", "init_lora_weights", init_lora_weights="olora"),
    _config("LoftQ", "unsupported_config", "init_lora_weights", init_lora_weights="loftq", loftq_config={MARK: 4}),
    _config("KaSA", "unsupported_config", "kasa_config", kasa_config={MARK: 1}),
    _config("VeLoRA", "invalid_config", "velora_config", velora_config=[MARK]),
    _config("EVA", "invalid_config", "eva_config", eva_config=[MARK]),
    _config("CorDA", "unsupported_config", "init_lora_weights", init_lora_weights="corda", corda_config={MARK: 1}),
    _config("activated LoRA with DoRA", "unsupported_config", "use_dora", use_dora=True, alora_invocation_tokens=[1]),
    _config("activated LoRA for no task", "unsupported_config", "task_type", task_type=None, **_INVOKED),
    _config("activated LoRA for another task", "unsupported_config", "task_type", task_type=MARK, **_INVOKED),
    _config("QALoRA", "unsupported_config", "use_qalora", use_qalora=True),
    _config("parts of a fused linear", "unsupported_config", "enable_lora", enable_lora=[True, False, True]),
    _config("replicated layers", "unsupported_config", "layer_replication", layer_replication=[[0, 2], [1, 2]]),
    _config(
        "target parameters", "unknown_module", "target_parameters[0]", target_modules=None, target_parameters=[MARK]
    ),
    _config("Megatron", "unsupported_config", "megatron_config", megatron_config={MARK: 1}),
    _config("layers under another name", "invalid_config", "layers_pattern", layers_pattern={MARK: 1}),
    _config("a key of the future", "unknown_config_key", MARK, kilroy=1),
    _config("a key of Python's", "unknown_config_key", "__class__", __class__=MARK),
    _config("a key of JavaScript's", "unknown_config_key", "__proto__", __proto__={"r": 1}),
    _config("an empty key", "unknown_config_key", "", **{"": 1}),
    _config("a key with a line break", "unknown_config_key", "kil?roy", **{"kil\nroy": 1}),
    _config("a key that turns the line around", "unknown_config_key", "?kilroy", **{"\u202ekilroy": 1}),
    _config("a key of 10000 letters", "unknown_config_key", (MARK * 40)[:197] + "...", **{MARK * 1667: 1}),
]

NAMES = [
    _config("targets as an empty expression", "invalid_config", "target_modules", target_modules=""),
    _config("rank 0 of an expression", "rank_out_of_range", "rank_pattern.^q", rank_pattern={"^q": 0}),
    _config("alpha of a slow expression", "unsupported_config", r"alpha_pattern.(\w*.?)*!", alpha_pattern={_SLOW: 4}),
    _config("alpha of half an expression", "unsupported_config", "alpha_pattern.(q", alpha_pattern={"(q": 4}),
    _config("rank of an expression", "rank_mismatch", Q_A, rank_pattern={r".*layers\.0\..*q_p\w+": 5}),
    _config("target that leads upwards", "invalid_config", "target_modules", target_modules=["../../etc/kilroy"]),
    _config("target as a path", "invalid_config", "target_modules", target_modules=["/etc/kilroy"]),
    _config("target as a URL", "invalid_config", "target_modules", target_modules=["http://kilroy/q_proj"]),
    _config("target with a NUL", "invalid_config", "target_modules", target_modules=["q_proj\x00"]),
    _config("target with a line break", "invalid_config", "target_modules", target_modules=["q_proj\n"]),
    _config("target that turns the line around", "invalid_config", "target_modules", target_modules=["\u202eq_proj"]),
    _config("target of look-alikes", "invalid_config", "target_modules", target_modules=["q_рroj"]),
    _config("target in full-width letters", "invalid_config", "target_modules", target_modules=["ｑ_proj"]),
    _config("empty target", "invalid_config", "target_modules", target_modules=[""]),
    _config("target of dots", "invalid_config", "target_modules", target_modules=["..."]),
    _config("target of 201 letters", "invalid_config", "target_modules", target_modules=["q" * 201]),
    _config("target with a blank", "invalid_config", "target_modules", target_modules=["q_proj "]),
    _config("all linears in a list", "invalid_config", "target_modules", target_modules=["all-linear"]),
    Hostile(
        name="target that no module has",
        code="unknown_module",
        param="target_modules[2]",
        change=partial(_with_c_attn, target_modules=["q_proj", "v_proj", "c_attn"]),
    ),
    Hostile(
        name="parameter that no module has",
        code="unknown_module",
        param="target_parameters[0]",
        change=partial(_with_c_attn, target_parameters=["attn.c_attn.weight"]),
    ),
    _config("targets that no module has", "unknown_module", "target_modules[0]", target_modules=["c_attn", "c_proj"]),
    _config("target that is a part of a name", "unknown_module", "target_modules[0]", target_modules=["proj"]),
    _config("target that is a whole layer", "unknown_module", "target_modules[0]", target_modules=["self_attn"]),
    _config(
        "target of another layer", "unknown_module", "target_modules[0]", target_modules=["layers.9.self_attn.q_proj"]
    ),
    _config("target in capitals", "unknown_module", "target_modules[0]", target_modules=["Q_PROJ"]),
    _config("rank of a name with a NUL", "unsupported_config", "rank_pattern.kil?roy", rank_pattern={"kil\x00roy": 2}),
    _config(
        "every target excluded",
        "invalid_config",
        "target_modules",
        target_modules=["q_proj"],
        exclude_modules=["q_proj"],
    ),
]

CONFIGS = [*TEXTS, *TYPES, *RANGES, *UNSUPPORTED, *NAMES]
