"""How the hidden states of a prompt become its embedding, as the files of a directory say.

sentence-transformers writes `modules.json`, a list of the steps, and the configuration of the step that pools, usually
`1_Pooling/config.json` (https://sbert.net/docs/package_reference/sentence_transformer/models.html). An adapter's
version has a `pooling.json` instead, such as `{"normalize": true, "pooling": "mean"}`, which a push makes of the
directory's files.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NoReturn, get_args

from loramux.adapter_store.errors import AdapterRejected
from loramux.adapter_store.formats.files.file_names import MODULES_FILE, POOLING_FILE
from loramux.adapter_store.formats.files.strict_json import InvalidJson, parse_strict_json

PoolingKind = Literal["last", "mean", "cls"]

MAX_BYTES = 64 * 1024
"""Largest file that is read, in bytes."""

_KINDS: dict[str, PoolingKind] = {
    "lasttoken": "last",
    "mean": "mean",
    "mean_tokens": "mean",
    "cls": "cls",
    "cls_token": "cls",
}
"""The names of sentence-transformers' poolings, without the prefix `pooling_mode_`."""

_PREFIX = "pooling_mode_"
_FOLDER = re.compile(r"[A-Za-z0-9_]{1,64}")


@dataclass(frozen=True, slots=True)
class Pooling:
    """The hidden state of the last or the first token (`cls`), or the mean of all.

    If `is_normalized`, embeddings have unit length.
    """

    kind: PoolingKind = "last"
    is_normalized: bool = True

    def document(self) -> dict[str, Any]:
        """Return the contents of a `pooling.json`."""
        return {"normalize": self.is_normalized, "pooling": self.kind}


DEFAULT_POOLING = Pooling()


def parse_pooling(text: bytes) -> Pooling:
    """Read an adapter's `pooling.json`: the keys `pooling` and, optionally, `normalize`. Raises AdapterRejected, whose
    `param` is the key at fault or the file's name.
    """
    try:
        document = parse_strict_json(text)
    except InvalidJson as error:
        raise AdapterRejected("invalid_json", f"the file is not JSON: {error}", POOLING_FILE) from None
    if not isinstance(document, dict) or not {"pooling"} <= document.keys() <= {"pooling", "normalize"}:
        message = f"{POOLING_FILE} must be a JSON object with pooling and, optionally, normalize"
        raise AdapterRejected("invalid_pooling", message, POOLING_FILE)
    for kind in get_args(PoolingKind):
        if document["pooling"] == kind and isinstance(document.get("normalize", True), bool):
            return Pooling(kind, document.get("normalize", True))
    key = "normalize" if document["pooling"] in get_args(PoolingKind) else "pooling"
    allowed = "true or false" if key == "normalize" else f"one of {', '.join(get_args(PoolingKind))}"
    raise AdapterRejected("invalid_pooling", f"{key} must be {allowed}", key)


def pooling_file(directory: Path) -> dict[str, bytes]:
    """Return the `pooling.json` that follows from the files of sentence-transformers in a directory, by its name.

    Empty without such files, or if the directory has a `pooling.json`. Raises AdapterRejected if the files cannot be
    used.
    """
    found = None if (directory / POOLING_FILE).exists() else directory_pooling(directory)
    return {} if found is None else {POOLING_FILE: json.dumps(found.document(), sort_keys=True).encode() + b"\n"}


def base_pooling(directory: Path, setting: str) -> Pooling:
    """Return the pooling of a base: the setting's unless it is `auto`, otherwise that of the base's files, if it has
    any. Raises AdapterRejected if the files cannot be used.
    """
    for kind in get_args(PoolingKind):
        if setting == kind:
            return Pooling(kind)
    return directory_pooling(directory) or DEFAULT_POOLING


def directory_pooling(directory: Path) -> Pooling | None:
    """Return what the files of a directory say, or None if it has no `modules.json`. Raises AdapterRejected."""
    path = directory / MODULES_FILE
    if not path.is_file():
        return None
    names: list[str] = []
    folder = ""
    modules = _read(path)
    if not isinstance(modules, list):
        _refuse(f"{path} is not a list")
    for module in modules:
        kind, place = (module.get(key) for key in ("type", "path")) if isinstance(module, dict) else (None, None)
        if not isinstance(kind, str) or not isinstance(place, str):
            _refuse(f"{path} has a module without a type and a path")
        names.append(kind.rpartition(".")[2])
        if names[-1] == "Pooling":
            folder = place
    if names not in (["Transformer", "Pooling"], ["Transformer", "Pooling", "Normalize"]):
        _refuse(f"{path} lists the modules {_listed(names)}: only Transformer, Pooling and Normalize are supported")
    if not _FOLDER.fullmatch(folder):
        _refuse(f"{path} has a module whose path is not the name of a folder")
    return Pooling(_kind(directory / folder / "config.json"), is_normalized=names[-1] == "Normalize")


def _kind(path: Path) -> PoolingKind:
    document = _read(path) if path.is_file() else None
    if not isinstance(document, dict):
        _refuse(f"{path} is not a JSON object")
    modes = [name.removeprefix(_PREFIX) for name, value in document.items() if name.startswith(_PREFIX) and value]
    mode = document.get("pooling_mode")
    if isinstance(mode, str):
        modes.append(mode)
    if len(modes) != 1 or modes[0] not in _KINDS:
        _refuse(f"{path} has the pooling {_listed(modes)}: lasttoken, mean_tokens or cls_token is needed")
    return _KINDS[modes[0]]


def _read(path: Path) -> Any:
    try:
        with path.open("rb") as file:
            text = file.read(MAX_BYTES + 1)
        if len(text) > MAX_BYTES:
            _refuse(f"{path} is larger than {MAX_BYTES} bytes")
        return parse_strict_json(text)
    except (InvalidJson, OSError) as error:
        _refuse(f"{path} cannot be read: {error}")


def _listed(names: list[str]) -> str:
    return " and ".join(repr(name[:40]) for name in names[:6]) or "of no name"


def _refuse(message: str) -> NoReturn:
    raise AdapterRejected("unsupported_pooling", message, MODULES_FILE)
