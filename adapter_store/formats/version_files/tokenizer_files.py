"""What the tokenizer beside an adapter says about prompts: chat templates, added and renamed tokens, special tokens.

A version does not keep the tokenizer's files, which can have many megabytes. The facts in which the tokenizer differs
from the base's become two of the version's optional files, `chat_template.jinja` and `added_vocabulary.json`.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypedDict

from loramux.adapter_store.errors import AdapterRejected
from loramux.adapter_store.formats.files.file_names import (
    CONFIG_FILE,
    EARLIER_TEMPLATE_FILE,
    SMALL_TOKENIZER_FILES,
    TEMPLATE_FILE,
    TENSORS_FILE,
    TOKENIZER_CONFIG_FILE,
    TOKENIZER_FILE,
    VOCABULARY_FILE,
)
from loramux.adapter_store.formats.files.safetensors_header import header_length, parse_header
from loramux.adapter_store.formats.version_files.added_vocabulary import (
    FLAGS,
    SPECIAL_TOKENS,
    AddedVocabulary,
    encode_added_vocabulary,
    parse_renamed,
    parse_special_tokens,
    parse_tokens,
)

MAX_BYTES: Mapping[str, int] = MappingProxyType(
    {TOKENIZER_FILE: 128 << 20, TOKENIZER_CONFIG_FILE: 4 << 20, EARLIER_TEMPLATE_FILE: 1 << 20, CONFIG_FILE: 1 << 20}
)
"""Largest size of each file that is read, in bytes. Gemma 3's `tokenizer_config.json` has 1.2 MB."""

DEFAULT, TOOL_USE = "default", "tool_use"
"""The names of the templates that are used, as in transformers. Other named templates are never used."""

NAMED_TEMPLATES = "additional_chat_templates"
"""The folder of the templates other than the default."""

_LINE_BREAK = re.compile(r"\r\n?")
_EMBEDDING_OR_HEAD = (
    "embed_tokens.weight",
    "lm_head.weight",
    "embed_tokens.base_layer.weight",
    "lm_head.base_layer.weight",
)


class VocabularyFacts(TypedDict):
    """The fields of `BaseVocabulary`."""

    num_tokens: int
    vocab_size: int
    added_tokens: dict[str, int]
    special_tokens: dict[str, str]
    sha256: str


@dataclass(frozen=True, slots=True)
class BaseVocabulary:
    """The base's tokenizer, as far as the tokenizers of adapters are compared with it.

    The tokenizer has `num_tokens` tokens. The embedding and the head have `vocab_size` rows. `added_tokens` maps the
    contents of the tokenizer's own added tokens to their IDs. `sha256` is the `vocabulary_sha256` of all other tokens.
    `special_tokens` maps roles, such as `eos_token`, to contents.
    """

    num_tokens: int
    vocab_size: int
    added_tokens: Mapping[str, int]
    special_tokens: Mapping[str, str]
    sha256: str

    def document(self) -> VocabularyFacts:
        """Return the facts as JSON values. The constructor takes them as keywords."""
        return {
            "num_tokens": self.num_tokens,
            "vocab_size": self.vocab_size,
            "added_tokens": dict(self.added_tokens),
            "special_tokens": dict(self.special_tokens),
            "sha256": self.sha256,
        }


def vocabulary_sha256(contents: Mapping[int, str]) -> str:
    """Return a digest of tokens by ID, in hexadecimal: the SHA-256 of a JSON array of pairs, by ascending ID."""
    return hashlib.sha256(json.dumps(sorted(contents.items())).encode()).hexdigest()


def has_tokenizer(directory: Path) -> bool:
    """Return whether a directory has a tokenizer or named templates, which `tokenizer_files` reads."""
    has_file = any((directory / name).is_file() for name in (TOKENIZER_FILE, *SMALL_TOKENIZER_FILES))
    return has_file or (directory / NAMED_TEMPLATES).is_dir()


def tokenizer_files(
    directory: Path, base: BaseVocabulary, without: Collection[str] = (), num_rows: int | None = None
) -> dict[str, bytes]:
    """Return the optional files of a version that follow from the tokenizer in its directory, by name.

    They replace files of the directory. Files in `without` are left out. `num_rows` is the number of rows of the
    adapter's embedding and head. If it is None, it is read from the adapter's own files. Raises OSError, or
    AdapterRejected if the tokenizer cannot be read, is not the base's, or adds tokens that cannot be served.
    """
    files: dict[str, bytes] = {}
    config = _object_in(directory / TOKENIZER_CONFIG_FILE)
    sources = {} if TEMPLATE_FILE in without else _own_sources(directory, config)
    template = one_template(sources) if sources else ""
    if template and (TOOL_USE in sources or not (directory / TEMPLATE_FILE).exists()):
        files[TEMPLATE_FILE] = template.encode()
    if VOCABULARY_FILE not in without and not (directory / VOCABULARY_FILE).exists():
        vocabulary = _own_vocabulary(directory, config, base, template, num_rows)
        if vocabulary is not None:
            files[VOCABULARY_FILE] = encode_added_vocabulary(vocabulary)
    return files


def template_sources(directory: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Return the chat templates of a Hugging Face directory by name. `config` is its `tokenizer_config.json`.

    As in transformers, Jinja files take precedence over the configuration. `chat_template.json` is read last. Raises
    OSError, UnicodeDecodeError, or AdapterRejected if that file is malformed.
    """
    files = {
        DEFAULT: directory / TEMPLATE_FILE,
        **{path.stem: path for path in sorted((directory / NAMED_TEMPLATES).glob("*.jinja"))},
    }
    if read := {name: path.read_text("utf-8") for name, path in files.items() if path.is_file()}:
        return read
    declared = config.get("chat_template") or _object_in(directory / EARLIER_TEMPLATE_FILE).get("chat_template")
    if isinstance(declared, str):
        return {DEFAULT: declared}
    if not isinstance(declared, list):
        return {}
    named = [item for item in declared if isinstance(item, dict)]
    return {
        item["name"]: item["template"]
        for item in named
        if isinstance(item.get("name"), str) and isinstance(item.get("template"), str)
    }


def one_template(sources: Mapping[str, str]) -> str:
    """Return a template with the results of the templates `default` and, for requests with tools, `tool_use`."""
    if TOOL_USE not in sources:
        return sources[DEFAULT]
    tools, default = (jinja_lines(sources[name]) for name in (TOOL_USE, DEFAULT))
    # Next to a tag, Jinja would remove white space of the templates. Next to an expression, it does not.
    return "{{% if tools is not none %}}{0}{1}{0}{{% else %}}{0}{2}{0}{{% endif %}}".format("{{ '' }}", tools, default)


def jinja_lines(source: str) -> str:
    """Return a template as Jinja reads it: with `\\n` as the only line break, and without one at the end."""
    return _LINE_BREAK.sub("\n", source).removesuffix("\n")


def _own_sources(directory: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Return an adapter's templates by name. Raises AdapterRejected if one is not text, or if none is the default.

    A malformed `chat_template.json`, which is read only if there are no others, counts as none.
    """
    try:
        try:
            sources = template_sources(directory, config)
        except AdapterRejected:
            sources = {}
        for source in sources.values():
            source.encode()
    except UnicodeError:
        raise AdapterRejected("invalid_template", "the template is not UTF-8", TEMPLATE_FILE) from None
    if DEFAULT not in sources and (sources or config.get("chat_template")):
        message = "the tokenizer's chat template must be a string, or a list of templates of which one is named default"
        raise AdapterRejected("invalid_template", message, "chat_template")
    return sources


def special_tokens_of(names: Mapping[str, Any]) -> dict[str, str]:
    """Return the contents of the special tokens in a tokenizer's configuration, by role."""
    named = {role: value for role in SPECIAL_TOKENS if (value := names.get(role))}
    return {role: str(one.get("content", "") if isinstance(one, dict) else one) for role, one in named.items()}


def _own_vocabulary(
    directory: Path, config: Mapping[str, Any], base: BaseVocabulary, template: str, num_rows: int | None
) -> AddedVocabulary | None:
    """Return the facts in which the directory's tokenizer differs from the base's, or None if there are none.

    Tokens without a row, such as a padding token that was used only in training, are left out. So are special tokens
    that neither end an answer nor appear in the template.
    """
    if num_rows is None:
        rows = _num_rows(directory / TENSORS_FILE)
        num_rows = rows or max(base.vocab_size, _last_trained(directory / CONFIG_FILE) + 1)
    document = _object_in(directory / TOKENIZER_FILE)
    tokens = _added_tokens(document, config)
    if document:
        _check_ordinary_tokens(document.get("model"), tokens, base)
    added = [fields for fields in tokens if base.num_tokens <= fields["id"] < num_rows]
    known = {token_id: content for content, token_id in base.added_tokens.items()}
    renamed = [
        fields
        for fields in tokens
        if fields["id"] < base.num_tokens
        and fields["content"] != known.get(fields["id"])
        # The digest has shown that the ordinary tokens of a `tokenizer.json` are the base's.
        and (fields["id"] in known or not document)
    ]
    special_tokens = {
        role: content
        for role, content in special_tokens_of(config).items()
        if content != base.special_tokens.get(role) and (role == "eos_token" or role in template)
    }
    if not added and not renamed and not special_tokens and num_rows == base.vocab_size:
        return None
    return AddedVocabulary(
        num_rows, parse_tokens(added, num_rows), parse_renamed(renamed), parse_special_tokens(special_tokens)
    )


def _check_ordinary_tokens(model: Any, tokens: list[dict[str, Any]], base: BaseVocabulary) -> None:
    """Raise AdapterRejected if the tokens that are not added tokens of the base differ from the base's."""
    try:
        vocabulary = model["vocab"]
        if isinstance(vocabulary, list):
            # A Unigram model lists tokens with their scores.
            contents = {index: content for index, (content, _) in enumerate(vocabulary)}
        else:
            contents = {token_id: content for content, token_id in vocabulary.items()}
        contents |= {fields["id"]: fields["content"] for fields in tokens}
        known = frozenset(base.added_tokens.values())
        ordinary = {
            token_id: content
            for token_id, content in contents.items()
            if token_id < base.num_tokens and token_id not in known
        }
        is_equal = vocabulary_sha256(ordinary) == base.sha256
    except (AttributeError, KeyError, TypeError, ValueError):
        raise AdapterRejected(
            "invalid_tokenizer", f"{TOKENIZER_FILE} has a malformed vocabulary", TOKENIZER_FILE
        ) from None
    if not is_equal:
        raise AdapterRejected(
            "tokenizer_mismatch",
            f"{TOKENIZER_FILE} is not the base's tokenizer: its tokens have other IDs, so the adapter was trained for "
            "another base, or needs the base's tokenizer",
            TOKENIZER_FILE,
        )


def _added_tokens(document: Mapping[str, Any], config: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the added tokens of a tokenizer, including those of the base, by ascending ID.

    `document` is its `tokenizer.json`, or empty if there is none. `config` is its `tokenizer_config.json`.
    """
    listed: Any
    if document:
        name, listed = TOKENIZER_FILE, document.get("added_tokens") or []
    else:
        name, listed = TOKENIZER_CONFIG_FILE, config.get("added_tokens_decoder") or {}
        if isinstance(listed, dict) and all(isinstance(fields, dict) for fields in listed.values()):
            listed = [{**fields, "id": _integer(token_id)} for token_id, fields in listed.items()]
    if not isinstance(listed, list) or not all(
        isinstance(one, dict) and type(one.get("id")) is int and isinstance(one.get("content"), str) for one in listed
    ):
        raise AdapterRejected("invalid_tokenizer", f"{name} has a malformed list of added tokens", name)
    tokens = [{key: one.get(key, False) for key in ("id", "content", *FLAGS)} for one in listed]
    return sorted(tokens, key=lambda token: token["id"])


def _object_in(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file, or an empty object if there is no file. Raises AdapterRejected or OSError."""
    if not path.is_file():
        return {}
    most = MAX_BYTES[path.name]
    if path.stat().st_size > most:
        raise AdapterRejected("file_too_large", f"{path.name} has more than {most} bytes", path.name)
    try:
        document = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise AdapterRejected("invalid_tokenizer", f"{path.name} is not JSON: {error}", path.name) from None
    if not isinstance(document, dict):
        raise AdapterRejected("invalid_tokenizer", f"{path.name} is not a JSON object", path.name)
    return document


def _integer(text: str) -> int | None:
    return int(text) if text.isascii() and text.isdecimal() and len(text) < 10 else None


def _num_rows(path: Path) -> int | None:
    """Return the number of rows of the embedding or the head in a safetensors file, or None if it has neither."""
    with path.open("rb") as file:
        size = path.stat().st_size
        length = header_length(file.read(256), size)
        file.seek(8)
        header = parse_header(file.read(length), size)
    for name, entry in header.tensors.items():
        if name.endswith(_EMBEDDING_OR_HEAD) and len(entry.shape) == 2:
            return entry.shape[0]
    return None


def _last_trained(path: Path) -> int:
    """Return the largest token ID in `trainable_token_indices`, or -1 if there is none.

    Invalid values are skipped, because the server refuses them later.
    """
    listed = _object_in(path).get("trainable_token_indices") or []
    lists = listed.values() if isinstance(listed, Mapping) else [listed]
    return max(
        (token for tokens in lists if isinstance(tokens, list) for token in tokens if type(token) is int), default=-1
    )
