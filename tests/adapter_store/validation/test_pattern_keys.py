"""Values of `rank_pattern` and `alpha_pattern` are chosen as PEFT chooses them, and expressions cost little time."""

from __future__ import annotations

import time
from typing import Any

import pytest

from loramux.adapter_store.errors import AdapterRejected
from loramux.adapter_store.validation import pattern_keys
from loramux.adapter_store.validation.name_patterns import NameSet, suffixes
from loramux.adapter_store.validation.pattern_keys import PatternKeys

MODULES = [
    *(
        f"model.layers.{layer}.{name}"
        for layer in (0, 1, 10, 11)
        for name in ("self_attn.q_proj", "self_attn.k_proj", "mlp.up_proj", "mlp.shared_expert_gate")
    ),
    "model.embed_tokens",
    "lm_head",
]
KNOWN = {name for module in MODULES for name in suffixes(module)}

PATTERNS: dict[str, list[str]] = {
    "literals": ["q_proj", "layers.1.mlp.up_proj", "lm_head"],
    "an expression": [r".*\.layers\.1\..*(q_proj|k_proj)$"],
    "an expression before a literal": [r"layers\.1\d?\..*", "q_proj"],
    "a literal before an expression": ["q_proj", r"layers\.1\d?\..*"],
    "two expressions that match one module": [r".*q.*", r".*proj"],
    "an anchor": [r"^model\.layers\.0\..*"],
    "an anchor in the middle": [r"layers\.0\.^self_attn"],
    "an escaped literal": [r"model\.layers\.10\.mlp\.up_proj"],
    "any parent": [r".*\.lm_head", r".*\.embed_tokens"],
    "a dot that is no dot": ["shared_expert.gate", "q.proj"],
    "two dots": ["layers.1..self_attn.q_proj"],
    "a part of a name": ["proj", "_proj", "attn.q_proj"],
    "an alternative that leaves the group": ["q_proj)|(x", "up_proj"],
    "nothing": [""],
    "a reference to PEFT's own group": [r"\1q_proj", "k_proj"],
    "possessive and atomic": [r"(?>.*\.)q_proj", r".*+k_proj"],
    "lookaround": [r"(?!.*layers\.1\.).*q_proj", r".*(?<=up_)proj"],
    "case": [r"(?i:Q_PROJ)"],
}


def keys_of(*keys: str, known: Any = KNOWN) -> PatternKeys[int]:
    return PatternKeys("alpha_pattern", [(key, order) for order, key in enumerate(keys)], known)


@pytest.mark.parametrize("keys", PATTERNS.values(), ids=PATTERNS)
def test_each_module_gets_the_value_that_peft_gives_it(keys: list[str]) -> None:
    from peft.utils.other import get_pattern_key

    ours = keys_of(*keys)
    values = dict(zip(keys, range(len(keys)), strict=True))
    matched = set()
    for module in MODULES:
        key = get_pattern_key(keys, module)
        assert ours.value(module, module, -1) == values.get(key, -1)
        matched |= {key for key in keys if get_pattern_key([key, *keys], module) == key}
    assert ours.unmatched == [f"alpha_pattern.{key}" for key in keys if key not in matched]


def test_a_key_that_an_earlier_key_hides_is_not_reported() -> None:
    ours = keys_of("q_proj", ".*", "nothing", r"no\w+")
    assert {ours.value(module, module, -1) for module in MODULES} == {0, 1}
    assert ours.unmatched == ["alpha_pattern.nothing", r"alpha_pattern.no\w+"]


def test_an_expression_sees_the_name_in_the_trained_model() -> None:
    ours = keys_of(r"^model\.language_model\.layers\.0\..*", "model.language_model.layers.1.self_attn.q_proj")
    q = "layers.{}.self_attn.q_proj"
    assert ours.value("model." + q.format(0), "model.language_model." + q.format(0), -1) == 0
    assert ours.value("model." + q.format(0), "model." + q.format(0), -1) == -1
    assert ours.value("model." + q.format(1), "model.language_model." + q.format(1), -1) == 1


@pytest.mark.parametrize(
    "key",
    [
        pytest.param(r"(\w*\.?)*!", id="nested repetition"),
        pytest.param(r"(.*)*(.*)*(.*)*x", id="repeated anything"),
        pytest.param(r"(([a-z_.0-9])+)+\d\d\d", id="groups"),
        pytest.param(r"(?i:[" + "".join(f"\\x{i:02x}-\\U0010ffff" for i in range(200)) + r"])*x", id="a large class"),
    ],
)
def test_an_expression_that_explodes_is_refused_by_name(key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pattern_keys, "MATCHING_S", 0.1)
    ours = keys_of("q_proj", key)
    start = time.process_time()
    with pytest.raises(AdapterRejected, match="takes too long") as refused:
        _ = [ours.value(module, module, -1) for module in MODULES]
    assert refused.value.code == "unsupported_config"
    assert str(refused.value.param).startswith(f"alpha_pattern.{key}"[:190])
    assert time.process_time() - start < 5


@pytest.mark.parametrize("key", ["(", "a{2,1}", "*", "(?i)q_proj", "[z-a]", "(" * 2000 + ")" * 2000, "a{99999999999}"])
def test_a_malformed_expression_is_refused_by_name(key: str) -> None:
    with pytest.raises(AdapterRejected, match="malformed") as refused:
        keys_of(key).value("lm_head", "lm_head", -1)
    assert refused.value.code == "unsupported_config"
    assert str(refused.value.param).startswith("alpha_pattern." + key[:5])


def test_hundreds_of_expressions_stay_within_the_time() -> None:
    modules = [f"model.layers.{layer}.self_attn.{name}_proj" for layer in range(32) for name in "qkvo"]
    ours = keys_of(*(rf"^model\.layers\.{i // 4}\.self_attn\.{'qkvo'[i % 4]}_proj" for i in range(128)), known=set())
    assert [ours.value(module, module, -1) for module in modules] == list(range(128))


def test_thousands_of_literals_are_looked_up() -> None:
    modules = [f"model.layers.{layer}.mlp.experts.{i}.w1" for layer in range(8) for i in range(512)]
    ours = keys_of(*modules, known=set(modules))
    assert [ours.value(module, module, -1) for module in modules] == list(range(len(modules)))


def test_a_set_finds_the_longest_name() -> None:
    names = NameSet(["b.c", "c", "a.b.c"])
    assert [names.match(key) for key in ("a.b.c", "x.c", "b.cc", "")] == ["a.b.c", "c", None, None]
