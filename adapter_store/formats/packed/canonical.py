"""An adapter's canonical file, whose SHA-256 is the adapter's identity.

It is a safetensors file with the tensors sorted by name, in their original dtype and without gaps. Its metadata has one
key, `config`, whose value is JSON with sorted keys. The JSON contains each module's scale, to which alpha, rsLoRA and
patterns have already been applied. If the adapter replaces rows of the embedding or the head, the JSON also says which
rows, and which tensors contain the new ones. The head of a classifier is stored as such rows. The JSON contains the
adapter's vocabulary size if that differs from the base's, and the tokens that activate an activated LoRA. Equal
adapters yield equal bytes, regardless of the order and names of the tensors in the uploaded files.

Every tensor has the bytes of the upload. If those of stacked experts are not in the usual form, the JSON contains their
forms, and `CanonicalAdapter` reads them in the usual form. In the file, their names have a suffix, so that a release of
loramux that does not know forms refuses the adapter.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy.typing as npt

from loramux.adapter_store.errors import AdapterCorrupt, AdapterRejected
from loramux.adapter_store.formats.files.strict_json import InvalidJson, parse_strict_json
from loramux.adapter_store.formats.files.tensor_file import TensorFile
from loramux.adapter_store.formats.packed.invocation_tokens import INVOCATION_KEY
from loramux.adapter_store.formats.packed.stack_form import StackForm
from loramux.adapter_store.formats.packed.trained_rows import TrainedRows

MAX_HEADER_BYTES = 64 << 20
"""Largest header of a canonical file, in bytes. The header is about as large as the upload's header, which
`PackTarget.max_header_bytes` limits.
"""
_ALIGNMENT = 8
_UNUSUAL_SUFFIX = ".in_another_form"


def write_canonical(
    tensors: Path | bytes,
    scales: Mapping[str, float],
    destination: Path,
    names: Mapping[str, str] | None = None,
    invocation_tokens: Sequence[int] = (),
    trained: Mapping[str, TrainedRows] = MappingProxyType({}),
    vocab_size: int | None = None,
    num_labels: int | None = None,
    stack_forms: Mapping[str, StackForm] = MappingProxyType({}),
) -> str:
    """Write the canonical file of a validated upload and return its digest in hexadecimal.

    `names` maps each canonical tensor name to the upload's own name; if it is None, the names are the same. `scales`
    and `trained` map modules to their scales and to their replaced rows. `vocab_size` is the adapter's vocabulary size,
    or None if it has the base's vocabulary. `num_labels` is the number of rows of a classifier's head, which
    `trained` contains as rows of `lm_head`, or None for other adapters.

    `stack_forms` maps canonical names of tensors of stacked experts to their forms, if these are not the usual one.
    """
    # Facts that do not apply are left out, so an adapter without them keeps its digest when a new fact is introduced.
    facts: dict[str, object] = {"peft_type": "LORA", "scales": dict(scales)}
    if invocation_tokens:
        facts[INVOCATION_KEY] = list(invocation_tokens)
    if trained:
        facts["trained_rows"] = {key: rows.document() for key, rows in trained.items()}
    if vocab_size is not None:
        facts["vocab_size"] = vocab_size
    if num_labels is not None:
        facts["num_labels"] = num_labels
    if stack_forms:
        facts["stack_forms"] = {name: asdict(form) for name, form in stack_forms.items()}
    config = json.dumps(facts, sort_keys=True, separators=(",", ":"))
    with TensorFile(tensors, MAX_HEADER_BYTES) as file, destination.open("wb") as out:
        usual = names or {name: name for name in file.header.tensors}
        originals = {f"{name}{_UNUSUAL_SUFFIX}" if name in stack_forms else name: usual[name] for name in usual}
        document: dict[str, object] = {"__metadata__": {"config": config}}
        position = 0
        for name in sorted(originals):
            entry = file.header.tensors[originals[name]]
            end = position + entry.end - entry.begin
            document[name] = {"dtype": entry.dtype, "shape": list(entry.shape), "data_offsets": [position, end]}
            position = end
        header = json.dumps(document, sort_keys=True, separators=(",", ":")).encode()
        header += b" " * (-len(header) % _ALIGNMENT)
        hashed = hashlib.sha256()
        for part in (len(header).to_bytes(8, "little"), header):
            hashed.update(part)
            out.write(part)
        for name in sorted(originals):
            for block in file.stored(originals[name]):
                hashed.update(block)
                out.write(block)
    return hashed.hexdigest()


def digest_of(source: Path | bytes) -> str:
    """Return the SHA-256 of a file or of bytes, in hexadecimal."""
    if isinstance(source, bytes):
        return hashlib.sha256(source).hexdigest()
    with source.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


class CanonicalAdapter(TensorFile):
    """An open canonical file. loramux itself wrote the file, so malformed content raises AdapterCorrupt."""

    def __init__(self, source: Path | bytes) -> None:
        try:
            super().__init__(source, MAX_HEADER_BYTES)
        except AdapterRejected as error:
            raise AdapterCorrupt(f"the canonical file is damaged: {error}") from error
        try:
            config = parse_strict_json(self.header.metadata["config"].encode())
            self.scales: dict[str, float] = {key: float(scale) for key, scale in config["scales"].items()}
            self.is_activated = INVOCATION_KEY in config
            rows = config.get("trained_rows", {})
            self.trained = {key: TrainedRows.from_document(document) for key, document in rows.items()}
            self.vocab_size: int | None = config.get("vocab_size")
            self.num_labels: int | None = config.get("num_labels")
            forms = config.get("stack_forms", {})
            self._forms = {name: StackForm(**form) for name, form in forms.items()}
            entries = dict(self.header.tensors)
            for name, form in self._forms.items():
                entry = entries.pop(f"{name}{_UNUSUAL_SUFFIX}")
                entries[name] = replace(entry, name=name, shape=form.usual_shape(entry.shape))
            self.header = replace(self.header, tensors=entries)
            self._last: tuple[str, npt.NDArray[Any]] | None = None
        except (InvalidJson, KeyError, TypeError, AttributeError, ValueError) as error:
            self.__exit__(None, None, None)
            raise AdapterCorrupt("the canonical file has no valid configuration") from error

    def raw_rows(self, name: str, rows: range) -> npt.NDArray[Any]:
        form = self._forms.get(name)
        if form is None:
            return super().raw_rows(name, rows)
        # The rows of all experts are read one after the other, so the whole matrix is kept.
        if self._last is None or self._last[0] != name:
            shape = self.header.tensors[name].shape
            stored = super().raw_rows(name, range(shape[0])).reshape(form.usual_shape(shape))
            self._last = name, form.usual(name, stored)
        return self._last[1][rows.start : rows.stop]
