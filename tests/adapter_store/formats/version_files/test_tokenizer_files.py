"""The facts in which an adapter's tokenizer differs from the base's become files of the version."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from loramux.adapter_store.errors import AdapterRejected
from loramux.adapter_store.formats.files.file_names import TEMPLATE_FILE, VOCABULARY_FILE
from loramux.adapter_store.formats.version_files.added_vocabulary import (
    AddedVocabulary,
    encode_added_vocabulary,
    parse_added_vocabulary,
)
from loramux.adapter_store.formats.version_files.tokenizer_files import MAX_BYTES, one_template, tokenizer_files
from loramux.engine.chat_templates.chat_template import ChatTemplate
from tests.adapter_store.base_tokenizer import ADDED, FLAGS, ORDINARY, base_vocabulary, with_tokenizer

BASE = base_vocabulary()
HEAD = "base_model.model.lm_head.weight"


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return resized(tmp_path, None)


def resized(directory: Path, num_rows: int | None, **config: Any) -> Path:
    """Write an adapter whose head has `num_rows` rows."""
    tensors = {"a": np.zeros((2, 2), np.float32)}
    if num_rows is not None:
        tensors[HEAD] = np.zeros((num_rows, 4), np.float32)
    save_file(tensors, directory / "adapter_model.safetensors")
    (directory / "adapter_config.json").write_text(json.dumps(config))
    return directory


def extracted(directory: Path, **options: Any) -> dict[str, Any] | None:
    content = tokenizer_files(directory, BASE, **options).get(VOCABULARY_FILE)
    return None if content is None else parse_added_vocabulary(content).report()


def test_a_copy_of_the_bases_tokenizer_has_no_facts(directory: Path) -> None:
    assert tokenizer_files(directory, BASE) == {}
    with_tokenizer(directory, bos_token="<|bos|>", eos_token={"content": "<|bos|>"}, pad_token="<|reserved_0|>")
    assert tokenizer_files(directory, BASE) == {}


def test_tokens_that_the_base_lacks_are_extracted(directory: Path) -> None:
    new = {"<b>": 61, "<a>": 60}
    assert extracted(with_tokenizer(directory, new)) == {"vocab_size": 70, "tokens": {"<a>": 60, "<b>": 61}}
    assert extracted(resized(directory, 72)) == {"vocab_size": 72, "tokens": {"<a>": 60, "<b>": 61}}
    assert tokenizer_files(directory, BASE, without=[VOCABULARY_FILE]) == {}
    with_tokenizer(resized(directory, 60))
    assert extracted(directory) == {"vocab_size": 60, "tokens": {}}


def test_tokens_without_a_row_are_left_out(directory: Path) -> None:
    """An example is a padding token that the trainer added to a base whose tokenizer is full."""
    with_tokenizer(directory, {"[PAD]": 70})
    assert extracted(directory) is None
    assert extracted(resized(directory, 71), num_rows=70) is None, "the tensors are not read"


def test_trained_tokens_beyond_the_base_have_rows(directory: Path) -> None:
    with_tokenizer(directory, {f"<{token}>": token for token in range(60, 72)})
    resized(directory, None, trainable_token_indices={"embed_tokens": [70, 71]})
    found = extracted(directory)
    assert found is not None
    assert (found["vocab_size"], len(found["tokens"])) == (72, 12)


def decoder_of(**tokens: int) -> dict[str, Any]:
    return {str(token_id): {"content": content, **FLAGS} for content, token_id in tokens.items()}


def test_tokenizer_config_is_read_without_a_fast_tokenizer(directory: Path) -> None:
    decoder = decoder_of(**{**ADDED, "<a>": 60, "t7": 7})
    (directory / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": decoder}))
    assert extracted(directory) == {"vocab_size": 70, "tokens": {"<a>": 60}, "renamed": {"t7": 7}}, (
        "only the server knows whether the base has the token t7"
    )


def test_renamed_tokens_of_the_base_are_extracted(directory: Path) -> None:
    with_tokenizer(directory, {"<|tool|>": 4})
    assert extracted(directory) == {"vocab_size": 70, "tokens": {}, "renamed": {"<|tool|>": 4}}
    decoder = decoder_of(**{**ADDED, "<|tool|>": 4})
    (directory / "tokenizer.json").unlink()
    (directory / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": decoder}))
    assert extracted(directory) == {"vocab_size": 70, "tokens": {}, "renamed": {"<|tool|>": 4}}


def test_special_tokens_are_extracted_if_they_end_answers_or_appear_in_the_template(directory: Path) -> None:
    own = {"bos_token": "<|reserved_0|>", "eos_token": {"content": "<|reserved_1|>"}, "pad_token": "<|reserved_0|>"}
    with_tokenizer(directory, **own)
    assert extracted(directory) == {"vocab_size": 70, "tokens": {}, "special_tokens": {"eos_token": "<|reserved_1|>"}}
    (directory / TEMPLATE_FILE).write_text("{{ bos_token }}{{ messages[0].content }}")
    found = extracted(directory)
    assert found is not None
    assert found["special_tokens"] == {"bos_token": "<|reserved_0|>", "eos_token": "<|reserved_1|>"}
    found = extracted(directory, without=[TEMPLATE_FILE])
    assert found is not None
    assert found["special_tokens"] == {"eos_token": "<|reserved_1|>"}


@pytest.mark.parametrize(
    "ordinary",
    [
        pytest.param({**ORDINARY, "other": 9}, id="another content"),
        pytest.param({name: ids for name, ids in ORDINARY.items() if ids != 9}, id="a token less"),
        pytest.param({"a": 0, "b": 1}, id="another size"),
        pytest.param({}, id="no tokens"),
    ],
)
def test_a_tokenizer_that_is_not_the_bases_is_refused(directory: Path, ordinary: dict[str, int]) -> None:
    with_tokenizer(directory, ordinary=ordinary)
    with pytest.raises(AdapterRejected) as refused:
        tokenizer_files(directory, BASE)
    assert (refused.value.code, refused.value.param) == ("tokenizer_mismatch", "tokenizer.json")
    assert tokenizer_files(directory, BASE, without=[VOCABULARY_FILE]) == {}


def test_a_tokenizer_that_lists_ordinary_tokens_as_added_tokens_is_the_bases(directory: Path) -> None:
    with_tokenizer(directory, {"t7": 7, "t8": 8}, {name: ids for name, ids in ORDINARY.items() if ids != 8})
    assert tokenizer_files(directory, BASE) == {}


def test_a_unigram_vocabulary_is_a_list(directory: Path) -> None:
    contents = {token_id: content for content, token_id in (ORDINARY | ADDED).items()}
    path = with_tokenizer(directory) / "tokenizer.json"
    document = json.loads(path.read_text())
    document["model"] = {"type": "Unigram", "vocab": [[contents[token_id], -1.5] for token_id in range(60)]}
    path.write_text(json.dumps(document))
    assert tokenizer_files(directory, BASE) == {}


TEXT = "{% for message in messages %}{{ message.content }}{% endfor %}"
NAMED = [
    {"name": "tool_use", "template": "T" + TEXT},
    {"name": "rag", "template": "R"},
    {"name": "default", "template": TEXT},
]


@pytest.mark.parametrize(
    ("declared", "expected"),
    [
        (TEXT, TEXT),
        (NAMED[1:], TEXT),
        (NAMED, one_template({"default": TEXT, "tool_use": "T" + TEXT})),
        (None, None),
        ([], None),
        ("", None),
    ],
    ids=["string", "default", "default and tool_use", "null", "no templates", "empty"],
)
def test_a_template_in_the_configuration_becomes_a_file(directory: Path, declared: Any, expected: str | None) -> None:
    with_tokenizer(directory, chat_template=declared)
    found = tokenizer_files(directory, BASE).get(TEMPLATE_FILE)
    assert found == (None if expected is None else expected.encode())
    assert TEMPLATE_FILE not in tokenizer_files(directory, BASE, without=[TEMPLATE_FILE])
    (directory / TEMPLATE_FILE).write_text("file")
    assert TEMPLATE_FILE not in tokenizer_files(directory, BASE), "as in transformers, the file takes precedence"


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (json.dumps({"chat_template": TEXT}), {TEMPLATE_FILE: TEXT.encode()}),
        ("{", {}),
        ("[]", {}),
        (" " * (MAX_BYTES["chat_template.json"] + 1), {}),
    ],
    ids=["template", "no JSON", "no object", "too large"],
)
def test_the_file_of_earlier_processors_is_used_if_it_can_be_read(
    directory: Path, content: str, expected: dict[str, bytes]
) -> None:
    (directory / "chat_template.json").write_text(content)
    assert tokenizer_files(directory, BASE) == expected


def test_a_template_for_tools_in_its_own_file_is_included(directory: Path) -> None:
    (directory / TEMPLATE_FILE).write_text(TEXT)
    (directory / "additional_chat_templates").mkdir()
    (directory / "additional_chat_templates" / "tool_use.jinja").write_text("T" + TEXT)
    expected = one_template({"default": TEXT, "tool_use": "T" + TEXT})
    assert tokenizer_files(directory, BASE) == {TEMPLATE_FILE: expected.encode()}


@pytest.mark.parametrize(
    "source",
    [
        "\n\n{{ messages[0].content }}\n\n",
        "  {%- if true %}x\n  {% endif %}  \n",
        "\r\n{# a #}\r\n y\r\n",
        "{% set a = 1 %}{{ a }}",
    ],
)
def test_one_template_renders_what_two_would(source: str) -> None:
    two = {"default": source, "tool_use": "T" + source + "T\n"}
    whole, parts = ChatTemplate({"default": one_template(two)}, {}), ChatTemplate(two, {})
    messages = [{"role": "user", "content": " Hello "}]
    for tools in (None, [], [{"type": "function"}]):
        assert whole.render(messages, tools=tools) == parts.render(messages, tools=tools)


@pytest.mark.parametrize(
    ("name", "text", "code"),
    [
        pytest.param("tokenizer.json", "{", "invalid_tokenizer", id="no JSON"),
        pytest.param("tokenizer.json", "[]", "invalid_tokenizer", id="no object"),
        pytest.param("tokenizer.json", '{"added_tokens": {"a": 1}}', "invalid_tokenizer", id="no list"),
        pytest.param("tokenizer.json", '{"added_tokens": [{"id": "60"}]}', "invalid_tokenizer", id="no id"),
        pytest.param(
            "tokenizer.json", '{"added_tokens": [{"id": 60, "content": 5}]}', "invalid_tokenizer", id="number"
        ),
        pytest.param("tokenizer.json", '{"model": {"vocab": {"a": "b"}}}', "invalid_tokenizer", id="no ids"),
        pytest.param("tokenizer.json", '{"model": {"vocab": [1]}}', "invalid_tokenizer", id="no pairs"),
        pytest.param("tokenizer.json", '{"model": []}', "invalid_tokenizer", id="no model"),
        pytest.param("tokenizer.json", '{"model": {}}', "invalid_tokenizer", id="no vocabulary"),
        pytest.param("tokenizer.json", "[" * 100_000, "invalid_tokenizer", id="nesting"),
        pytest.param("tokenizer_config.json", "\xff", "invalid_tokenizer", id="no JSON in the configuration"),
        pytest.param("tokenizer_config.json", '{"added_tokens_decoder": [1]}', "invalid_tokenizer", id="no decoder"),
        pytest.param(
            "tokenizer_config.json", '{"added_tokens_decoder": {"x": {}}}', "invalid_tokenizer", id="no number"
        ),
        pytest.param("tokenizer_config.json", '{"eos_token": {"x": 1}}', "invalid_vocabulary", id="no end token"),
        pytest.param("tokenizer_config.json", '{"chat_template": 5}', "invalid_template", id="template is a number"),
        pytest.param("tokenizer_config.json", '{"chat_template": ["x"]}', "invalid_template", id="unnamed template"),
        pytest.param(
            "tokenizer_config.json", json.dumps({"chat_template": NAMED[:2]}), "invalid_template", id="no default"
        ),
        pytest.param("tokenizer_config.json", '{"chat_template": "\\ud800"}', "invalid_template", id="half a pair"),
    ],
)
def test_a_malformed_tokenizer_is_refused(directory: Path, name: str, text: str, code: str) -> None:
    (directory / name).write_text(text, "latin-1")
    with pytest.raises(AdapterRejected) as refused:
        tokenizer_files(directory, BASE)
    assert refused.value.code == code
    assert len(refused.value.message) < 300


def test_a_huge_configuration_is_refused_unread(directory: Path) -> None:
    with (directory / "tokenizer_config.json").open("wb") as file:
        file.truncate(50 << 20)
    with pytest.raises(AdapterRejected) as refused:
        tokenizer_files(directory, BASE)
    assert (refused.value.code, refused.value.param) == ("file_too_large", "tokenizer_config.json")
    assert str(MAX_BYTES["tokenizer_config.json"]) in refused.value.message


def test_facts_survive_the_file(directory: Path) -> None:
    with_tokenizer(directory, {"<|tool|>": 4, "<a>": 60}, eos_token="<a>")
    content = tokenizer_files(directory, BASE)[VOCABULARY_FILE]
    parsed = parse_added_vocabulary(content)
    assert encode_added_vocabulary(parsed) == content
    assert hash(parsed) == hash(parse_added_vocabulary(content))
    plain = json.loads(encode_added_vocabulary(AddedVocabulary(70, ())))
    assert plain == {"vocab_size": 70, "tokens": []}, "files without these facts keep their digests"


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"renamed": None}, "renamed"),
        ({"renamed": {}}, "renamed"),
        ({"renamed": [{"id": 4}]}, "renamed[0]"),
        ({"renamed": [{"id": 5, "content": "<x>", **FLAGS}, {"id": 4, "content": "<y>", **FLAGS}]}, "renamed[1].id"),
        ({"renamed": [{"id": 4, "content": "<x>", **FLAGS}] * 2}, "renamed[1].content"),
        ({"renamed": [{"id": n, "content": f"<{n}>", **FLAGS} for n in range(257)]}, "renamed"),
        ({"special_tokens": []}, "special_tokens"),
        ({"special_tokens": {"end": "x"}}, "special_tokens"),
        ({"special_tokens": {"eos_token": ""}}, "special_tokens.eos_token"),
        ({"special_tokens": {"eos_token": "x" * 257}}, "special_tokens.eos_token"),
        ({"special_tokens": {"eos_token": None}}, "special_tokens.eos_token"),
        ({"more": 1}, "added_vocabulary.json"),
    ],
)
def test_bad_facts_in_an_upload_are_refused_by_name(changes: dict[str, Any], param: str) -> None:
    document = {"vocab_size": 70, "tokens": [], **changes}
    with pytest.raises(AdapterRejected) as refused:
        parse_added_vocabulary(json.dumps(document).encode())
    assert (refused.value.code, refused.value.param) == ("invalid_vocabulary", param)
