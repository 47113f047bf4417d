"""Parses PEFT's adapter_config.json against an allow-list. An unsupported key is refused by name."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, NoReturn

from loramux.adapter_store.errors import AdapterRejected, printable
from loramux.adapter_store.formats.files.file_names import CONFIG_FILE
from loramux.adapter_store.formats.files.strict_json import DuplicateKey, InvalidJson, parse_strict_json
from loramux.adapter_store.formats.files.text_names import text_module
from loramux.adapter_store.formats.packed.class_head import CLASS_HEADS
from loramux.adapter_store.formats.packed.invocation_tokens import INVOCATION_KEY, check_invocation_tokens
from loramux.adapter_store.validation.class_head import (
    FEATURE_EXTRACTION,
    LABEL_KEYS,
    SEQUENCE_CLASSIFICATION,
    LabelConfig,
    parse_labels,
)
from loramux.adapter_store.validation.name_patterns import is_literal
from loramux.adapter_store.validation.stacked_config import DETAIL_KEY, LAYOUT_KEY, is_from_unsloth, parse_b_layout
from loramux.adapter_store.validation.trained_config import parse_modules_to_save, parse_token_indices
from loramux.kernels.layout import MAX_RANK

MAX_CONFIG_BYTES = 1 << 20
MAX_ALPHA = 65536.0
MAX_NAMES = 4096
"""Maximum number of entries in a list of names, or in `rank_pattern` or `alpha_pattern`."""

_MAX_RECORDED_LEN = 500
_MAX_REGEX_LEN = 4096
"""Maximum length of a key in `rank_pattern` or `alpha_pattern`, in characters."""
ALL_LINEAR = "all-linear"

_UNDERSTOOD = frozenset(
    {
        "peft_type",
        "r",
        "lora_alpha",
        "target_modules",
        "exclude_modules",
        "target_parameters",
        "rank_pattern",
        "alpha_pattern",
        "use_rslora",
        "use_dora",
        "lora_bias",
        "layers_to_transform",
        "layers_pattern",
        INVOCATION_KEY,
        "modules_to_save",
        "trainable_token_indices",
        "ensure_weight_tying",
        LAYOUT_KEY,
        DETAIL_KEY,
        *LABEL_KEYS,
    }
)

# Keys with facts about training or notes for human readers. No value of the listed types changes the adapter's output.
# What each key does is read from PEFT's own code, versions 0.1 to 0.21.
_RECORDED = ("base_model_name_or_path", "revision", "peft_version", "task_type")
_WITHOUT_EFFECT: dict[str, tuple[type, ...]] = {
    **dict.fromkeys(_RECORDED, (str,)),
    "inference_mode": (bool,),
    "lora_dropout": (int, float),
    "megatron_core": (str,),
    "qalora_group_size": (int,),
    # PEFT writes the names of the training program's classes here if no task type was given, and Unsloth in any case.
    "auto_mapping": (dict,),
    # True for bases that store their weights transposed. No supported base does, and PEFT ignores the key for other
    # bases.
    "fan_in_fan_out": (bool,),
    # The settings of initialisations. `init_lora_weights` decides whether they were used.
    **dict.fromkeys(("corda_config", "eva_config", "loftq_config", "lora_ga_config"), (dict,)),
    # VeLoRA compresses what the backward pass keeps, and MonteCLoRA adds noise to A in training.
    **dict.fromkeys(("monteclora_config", "velora_config"), (dict,)),
    # PEFT ignores this key in a file.
    "runtime_config": (dict,),
    # Written by PEFT before 0.3: true if weights were merged during evaluation.
    "merge_weights": (bool,),
    # Written by ms-swift's own LoRA: the dtype of the weights, and the learning rates of LoRA+.
    "lora_dtype": (str,),
    **dict.fromkeys(("lorap_emb_lr", "lorap_lr_ratio"), (int, float)),
}

# Unsupported features, with the values that turn them off.
_OFF: dict[str, tuple[Any, ...]] = {
    # ms-swift's name for `peft_type`.
    "swift_type": ("LORA", None),
    # The base's biases are trained too, and stored in the file if the base has any: see `PeftConfig.trains_biases`.
    "bias": ("none", "all", "lora_only"),
    "init_lora_weights": (True, False, None, "gaussian", "orthogonal", "eva", "mica"),
    **dict.fromkeys(
        (
            "arrow_config",
            "enable_lora",
            "kasa_config",
            "layer_replication",
            "megatron_config",
            "use_bdlora",
            "use_qalora",
        ),
        (None, [], {}, False),
    ),
}

_NOTHING: tuple[Any, ...] = (None, False, 0, "", [], {})
"""Values that turn an option off. PEFT writes all of its options, and newer versions have options not known here."""

_CHANGES_BASE = ("corda", "lora_ga", "olora", "pissa")
"""Prefixes of the initialisations that change the base's weights. An adapter does not contain the changed weights."""
_OTHER_HEADS = ("TOKEN_CLS", "QUESTION_ANS")
"""Task types whose heads are not served."""
_LAYERS_PATTERNS: tuple[Any, ...] = (None, "", [], "layers", ["layers"])
"""The values of `layers_pattern` that stand for the list of layers in every supported base."""


@dataclass(frozen=True, slots=True)
class PeftConfig:
    """The fields of a LoRA configuration that affect the result.

    Patterns are `(key, value)` pairs, with the keys and the order of the file. `target_modules` is None for all linear
    layers or for a regular expression; `layers` is None for all layers. `modules_to_save` contains the keys of the
    embedding and the head if their own weights were trained as a whole. `saved_norms` contains the other names in the
    configuration's `modules_to_save` with their places in the list. `token_indices` contains pairs of a module's key
    and the tokens whose rows in that module were trained. A regular expression that selects modules
    (`targets_from_tensors`) never runs, because the tensors of the file show what it selected. `invocation_tokens` is
    empty unless the adapter is an activated LoRA (aLoRA). With `trains_biases`, the file can replace biases of the
    base.

    With `has_class_head`, the file has the head of a classifier, whose labels `labels` can name.

    `target_parameters` names tensors of the base that the adapter changes like modules, such as the stacked weights of
    experts. `b_layout` is the order of the columns of their B, or None if the configuration does not say. An earlier
    Unsloth (`is_from_unsloth`) did not, and used another order than PEFT. With `use_dora`, each module has a magnitude
    vector; with `lora_bias`, each B has a bias. PEFT does not allow both.
    """

    rank: int
    alpha: float
    use_rslora: bool
    use_dora: bool
    lora_bias: bool
    target_modules: tuple[str, ...] | None
    target_parameters: tuple[str, ...]
    b_layout: str | None
    is_from_unsloth: bool
    exclude_modules: tuple[str, ...]
    rank_pattern: tuple[tuple[str, int], ...]
    alpha_pattern: tuple[tuple[str, float], ...]
    layers: tuple[int, ...] | None
    targets_from_tensors: bool
    trains_biases: bool
    invocation_tokens: tuple[int, ...]
    modules_to_save: frozenset[str]
    saved_norms: tuple[tuple[int, str], ...]
    token_indices: tuple[tuple[str, tuple[int, ...]], ...]
    ensure_weight_tying: bool
    has_class_head: bool
    labels: LabelConfig
    is_for_embeddings: bool
    recorded: dict[str, str | None]

    @property
    def features(self) -> tuple[str, ...]:
        """The keys of the features that the adapter uses besides the products B A, such as `use_dora`."""
        used = {
            "use_dora": self.use_dora,
            "lora_bias": self.lora_bias,
            "modules_to_save": self.modules_to_save or self.saved_norms or self.has_class_head,
            "trainable_token_indices": self.token_indices,
        }
        return tuple(name for name, value in used.items() if value)


def parse_peft_config(text: bytes) -> PeftConfig:
    """Parse a configuration. Raises AdapterRejected, which names the offending key."""
    document = _parse(text)
    _check_method(document)
    _check_task(document)
    _check_initialisation(document.get("init_lora_weights"))
    for key, value in document.items():
        if key in _OFF:
            found = value.lower() if key == "init_lora_weights" and isinstance(value, str) else value
            # Compare types too, because Python considers 0 equal to False, and 1 equal to True.
            if not any(type(found) is type(off) and found == off for off in _OFF[key]):
                allowed = " or ".join(map(json.dumps, _OFF[key]))
                _refuse("unsupported_config", f"this value of {key} is not supported: it must be {allowed}", key)
        elif key in _WITHOUT_EFFECT:
            if value is not None and type(value) not in _WITHOUT_EFFECT[key]:
                _refuse("invalid_config", f"{key} is {_shown(value)}, which has the wrong type", key)
        elif key not in _UNDERSTOOD and value not in _NOTHING:
            message = "unknown key in the configuration: if it has no effect on the adapter's answers, remove it"
            _refuse("unknown_config_key", message, key)
    if "peft_type" not in document:
        _refuse("invalid_config", 'peft_type is missing: for a LoRA, set it to "LORA"', "peft_type")
    use_dora, lora_bias = _switch(document, "use_dora"), _switch(document, "lora_bias")
    if use_dora and lora_bias:
        _refuse("unsupported_config", "PEFT does not support lora_bias with DoRA", "lora_bias")
    invocation_tokens = _invocation_tokens(document)
    if use_dora and invocation_tokens:
        _refuse("unsupported_config", f"PEFT does not support DoRA with {INVOCATION_KEY}", "use_dora")
    parameters = _target_parameters(document)
    ranks = _pattern(document, "rank_pattern")
    alphas = _pattern(document, "alpha_pattern")
    modules_to_save, saved_norms = parse_modules_to_save(document.get("modules_to_save"))
    has_class_head = False
    if document.get("task_type") == SEQUENCE_CLASSIFICATION:
        has_class_head = any(name in CLASS_HEADS for _, name in saved_norms)
        saved_norms = tuple(one for one in saved_norms if one[1] not in CLASS_HEADS)
    targets, exclusions = document.get("target_modules"), document.get("exclude_modules")
    layers = _layers(document.get("layers_to_transform"))
    is_regex = isinstance(targets, str) and targets.lower() != ALL_LINEAR
    has_own_layers = _layers_pattern(document.get("layers_pattern")) not in _LAYERS_PATTERNS and layers is not None
    return PeftConfig(
        rank=_rank(document.get("r"), "r"),
        alpha=_alpha(document.get("lora_alpha"), "lora_alpha"),
        use_rslora=_switch(document, "use_rslora"),
        use_dora=use_dora,
        lora_bias=lora_bias,
        target_modules=_target_modules(targets, may_be_empty=bool(parameters)),
        target_parameters=parameters,
        b_layout=parse_b_layout(document),
        is_from_unsloth=is_from_unsloth(document),
        exclude_modules=_exclude_modules(exclusions),
        rank_pattern=tuple((name, _rank(value, f"rank_pattern.{name}")) for name, value in ranks),
        alpha_pattern=tuple((name, _alpha(value, f"alpha_pattern.{name}")) for name, value in alphas),
        layers=layers,
        targets_from_tensors=is_regex or bool(exclusions and isinstance(exclusions, str)) or has_own_layers,
        trains_biases=document.get("bias", "none") != "none",
        invocation_tokens=invocation_tokens,
        modules_to_save=modules_to_save,
        saved_norms=saved_norms,
        token_indices=parse_token_indices(document.get("trainable_token_indices")),
        ensure_weight_tying=_switch(document, "ensure_weight_tying"),
        has_class_head=has_class_head,
        labels=parse_labels(document),
        is_for_embeddings=document.get("task_type") == FEATURE_EXTRACTION,
        recorded={key: _recorded(document.get(key)) for key in _RECORDED},
    )


def _parse(text: bytes) -> dict[str, Any]:
    if len(text) > MAX_CONFIG_BYTES:
        _refuse("config_too_large", f"the configuration is larger than {MAX_CONFIG_BYTES} bytes", CONFIG_FILE)
    try:
        document = parse_strict_json(text)
    except DuplicateKey as error:
        _refuse("duplicate_key", f"in the configuration, {error}", error.key)
    except InvalidJson as error:
        _refuse("invalid_json", f"the configuration is not JSON: {error}", CONFIG_FILE)
    if not isinstance(document, dict):
        _refuse("invalid_json", "the configuration is not a JSON object", CONFIG_FILE)
    return document


def _switch(document: dict[str, Any], key: str) -> bool:
    value = document.get(key)
    if value is not None and not isinstance(value, bool):
        _refuse("invalid_config", f"{key} must be true or false, not {_shown(value)}", key)
    return bool(value)


def _rank(value: Any, param: str) -> int:
    if value is None:
        _refuse("invalid_config", f"{param} is missing or null: set it to the rank used in training", param)
    if type(value) is not int:
        _refuse("invalid_config", f"a rank must be an integer, not {_shown(value)}", param)
    if not 1 <= value <= MAX_RANK:
        _refuse("rank_out_of_range", f"a rank must be between 1 and {MAX_RANK}, not {_shown(value)}", param)
    return value


def _alpha(value: Any, param: str) -> float:
    if value is None:
        # PEFT would silently use 8, whatever the value in training was.
        _refuse("invalid_config", f"{param} is missing or null: set it to the alpha used in training", param)
    if type(value) not in (int, float):
        _refuse("invalid_config", f"alpha must be a number, not {_shown(value)}", param)
    if not 0 < value <= MAX_ALPHA:
        _refuse("alpha_out_of_range", f"alpha must be above 0 and at most {MAX_ALPHA:g}", param)
    return float(value)


def _target_modules(value: Any, may_be_empty: bool) -> tuple[str, ...] | None:
    if isinstance(value, str) and value:
        # All linear layers, or a regular expression. The tensors' names are used instead of the expression.
        return None
    if may_be_empty and (value is None or value == []):
        return ()
    names = _names(value, "target_modules")
    if not names:
        _refuse("invalid_config", "target_modules must not be empty", "target_modules")
    return names


def _target_parameters(document: dict[str, Any]) -> tuple[str, ...]:
    key = "target_parameters"
    names = () if document.get(key) is None else _names(document[key], key)
    for other in ("use_dora", "lora_bias", INVOCATION_KEY) if names else ():
        if document.get(other):
            _refuse("unsupported_config", f"PEFT does not support {other} with {key}", other)
    return names


def _exclude_modules(value: Any) -> tuple[str, ...]:
    if value is None or isinstance(value, str):
        return ()
    return _names(value, "exclude_modules")


def _layers_pattern(value: Any) -> Any:
    names = value if isinstance(value, list) else [value]
    if value is not None and not all(isinstance(name, str) for name in names):
        _refuse("invalid_config", "layers_pattern must be one or more names", "layers_pattern")
    return value


def _check_method(document: dict[str, Any]) -> None:
    """Refuse PEFT's other methods, before their own keys are refused as unknown."""
    if "peft_type" in document and document["peft_type"] != "LORA":
        message = 'the adapter is not a LoRA: only adapters whose peft_type is "LORA" are served'
        _refuse("unsupported_config", message, "peft_type")


def _check_task(document: dict[str, Any]) -> None:
    """Refuse heads for single tokens, which PEFT adds to the modules that it saves."""
    if document.get("task_type") in _OTHER_HEADS and document.get("modules_to_save"):
        _refuse(
            "unsupported_config",
            "the adapter has a trained head for single tokens, but only adapters for text generation, embeddings and "
            "classes of texts are served (task_type CAUSAL_LM, FEATURE_EXTRACTION or SEQ_CLS)",
            "task_type",
        )


def _check_initialisation(value: Any) -> None:
    """Refuse initialisations that changed the base's weights, and say how to convert the adapter."""
    if isinstance(value, str) and value.lower() == "loftq":
        _refuse(
            "unsupported_config",
            "loftq fits an adapter to weights that LoftQ quantised, and PEFT cannot convert it: train the adapter "
            "again with another init_lora_weights, such as true",
            "init_lora_weights",
        )
    if isinstance(value, str) and value.lower().startswith(_CHANGES_BASE):
        _refuse(
            "unsupported_config",
            f"{printable(value, 40)} changed the base's weights during training: convert the adapter to a plain LoRA "
            "with PEFT's save_pretrained(..., path_initial_model_for_weight_conversion=...)",
            "init_lora_weights",
        )


def _names(value: Any, param: str) -> tuple[str, ...]:
    if not isinstance(value, list) or not all(isinstance(name, str) and is_literal(name) for name in value):
        _refuse("invalid_config", f"{param} must be a list of module names", param)
    if len(value) > MAX_NAMES:
        _refuse("invalid_config", f"{param} must have at most {MAX_NAMES} names", param)
    return tuple(map(text_module, value))


def _pattern(document: dict[str, Any], key: str) -> list[tuple[str, Any]]:
    value = document.get(key)
    if value is None:
        return []
    if not isinstance(value, dict):
        _refuse("invalid_config", f"{key} must be an object", key)
    if len(value) > MAX_NAMES:
        _refuse("invalid_config", f"{key} must have at most {MAX_NAMES} names", key)
    for name in value:
        if not name.isprintable() or len(name) > _MAX_REGEX_LEN:
            _refuse(
                "unsupported_config",
                f"a pattern must be printable text of at most {_MAX_REGEX_LEN} characters",
                f"{key}.{name}",
            )
    return list(value.items())


def _layers(value: Any) -> tuple[int, ...] | None:
    if value is None or value == []:
        return None
    layers = value if isinstance(value, list) else [value]
    if not all(type(layer) is int and layer >= 0 for layer in layers):
        _refuse("invalid_config", "layers_to_transform must be one or more layer numbers", "layers_to_transform")
    return tuple(layers)


def _invocation_tokens(document: dict[str, Any]) -> tuple[int, ...]:
    value = document.get(INVOCATION_KEY)
    if value is None:
        return ()
    if not isinstance(value, list) or not value or not all(type(token_id) is int for token_id in value):
        _refuse("invalid_config", f"{INVOCATION_KEY} must be null or a list of token ids", INVOCATION_KEY)
    try:
        check_invocation_tokens(value)
    except ValueError as error:
        _refuse("invalid_config", str(error), INVOCATION_KEY)
    if document.get("task_type") != "CAUSAL_LM":
        # With any other task type, PEFT loads the adapter but never activates it.
        _refuse("unsupported_config", "an activated LoRA needs task_type CAUSAL_LM", "task_type")
    return tuple(value)


def _shown(value: Any) -> str:
    """Describe a value of the configuration. Messages do not repeat text that a tenant chose."""
    for kind, name in ((str, "a text"), (list, "a list"), (dict, "an object")):
        if isinstance(value, kind):
            return name
    return printable(json.dumps(value), 20)


def _recorded(value: str | None) -> str | None:
    return printable(value, _MAX_RECORDED_LEN) if value else None


def _refuse(code: str, message: str, param: str) -> NoReturn:
    raise AdapterRejected(code, message, param)
