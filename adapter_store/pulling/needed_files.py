"""Chooses the files of a repository that a server reads. Everything else, pickles above all, is never fetched."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable

from loramux.adapter_store.errors import PullRefused, printable
from loramux.adapter_store.formats.files.file_names import (
    CONFIG_FILE,
    EARLIER_TEMPLATE_FILE,
    GENERATION_FILE,
    MODULES_FILE,
    TEMPLATE_FILE,
    TOKENIZER_CONFIG_FILE,
    TOKENIZER_FILE,
)
from loramux.adapter_store.pulling.download import read_verified
from loramux.adapter_store.pulling.model_name import ModelName
from loramux.adapter_store.pulling.remote import Remote, RemoteFile

CONFIG, INDEX, WEIGHTS = "config.json", "model.safetensors.index.json", "model.safetensors"
_OPTIONAL = (
    GENERATION_FILE,
    TOKENIZER_FILE,
    TOKENIZER_CONFIG_FILE,
    "special_tokens_map.json",
    TEMPLATE_FILE,
    EARLIER_TEMPLATE_FILE,
    MODULES_FILE,
)
_MODULE = re.compile(r"[A-Za-z0-9_]{1,64}/config\.json")
_TEMPLATE = re.compile(r"additional_chat_templates/[A-Za-z0-9_][A-Za-z0-9._-]{0,63}\.jinja")
_SHARD = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,199}\.safetensors")
_PICKLE = re.compile(r".*\.(bin|pt|pth|ckpt|pkl)")

MAX_SMALL_BYTES = 256 << 20
"""Largest file other than weights, in bytes. Tokenizers of 262,144 tokens have 33 MB."""

MAX_INDEX_BYTES = 64 << 20
MAX_SHARDS = 1000
MAX_TEMPLATES = 16
MAX_MODULES = 16
"""Most folders with the configuration of a step of sentence-transformers, such as `1_Pooling`."""
_MAX_SHOWN = 12


def needed_files(remote: Remote, name: ModelName) -> tuple[list[RemoteFile], list[RemoteFile]]:
    """Return the small files and the weights of a base model. Raises PullRefused or SourceUnavailable."""
    if name.file is not None:
        _require(name.files, remote, name)
        return [], [remote.file(file) for file in name.files]
    _check_kind(remote.names, name)
    templates = sorted(filter(_TEMPLATE.fullmatch, remote.names))[:MAX_TEMPLATES]
    modules = sorted(filter(_MODULE.fullmatch, remote.names))[:MAX_MODULES] if MODULES_FILE in remote.names else []
    small = [remote.file(file) for file in (CONFIG, *_OPTIONAL, *templates, *modules) if file in remote.names]
    for file in small:
        _check_size(file, MAX_SMALL_BYTES)
    if INDEX not in remote.names:
        return small, [remote.file(WEIGHTS)]
    index = remote.file(INDEX)
    _check_size(index, MAX_INDEX_BYTES)
    shards = _shards(read_verified(remote, index))
    _require(shards, remote, name)
    return [*small, index], [remote.file(shard) for shard in shards]


def _check_kind(names: frozenset[str], name: ModelName) -> None:
    """Check that there is a base model in safetensors files, or say what there is instead."""
    place = f"{name.kind}://{name.place}"
    if CONFIG in names and (WEIGHTS in names or INDEX in names):
        return
    if CONFIG_FILE in names:
        message = f"{place} is an adapter, not a base model: use 'loramux adapters push' with {name.url}"
        raise PullRefused("not_a_base", message, "model")
    if files := sorted(file for file in names if file.endswith(".gguf")):
        shown = ", ".join(printable(file, 100) for file in files[:_MAX_SHOWN])
        more = f" and {len(files) - _MAX_SHOWN} more" if len(files) > _MAX_SHOWN else ""
        message = f"{place} has GGUF files: choose one, as in {place}/{printable(files[0], 100)}. It has {shown}{more}"
        raise PullRefused("choose_a_file", message, "model")
    if any(map(_PICKLE.fullmatch, names)):
        message = f"{place} has weights only as pickles, which can run code and are never read: use a safetensors copy"
        raise PullRefused("only_pickles", message, "model")
    missing = CONFIG if CONFIG not in names else f"{WEIGHTS} and no {INDEX}"
    raise PullRefused("not_a_base", f"{place} has no {missing}", "model")


def _shards(index: bytes) -> list[str]:
    try:
        places = json.loads(index)["weight_map"]
        names = {str(name) for name in places.values()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise PullRefused("invalid_index", f"{INDEX} has no map of the weights", INDEX) from None
    if not names or len(names) > MAX_SHARDS:
        raise PullRefused("invalid_index", f"{INDEX} must name 1 to {MAX_SHARDS} files, not {len(names)}", INDEX)
    for name in sorted(names):
        if not _SHARD.fullmatch(name):
            raise PullRefused("invalid_index", f"{INDEX} names {printable(name, 100)!r}, which is no shard", INDEX)
    return sorted(names)


def _require(files: Iterable[str], remote: Remote, name: ModelName) -> None:
    for file in files:
        if file not in remote.names:
            raise PullRefused("file_missing", f"{name.kind}://{name.place} has no {file}", file)


def _check_size(file: RemoteFile, max_bytes: int) -> None:
    if file.size > max_bytes:
        raise PullRefused("file_too_large", f"{file.name} has more than {max_bytes} bytes", file.name)
