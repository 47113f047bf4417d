"""Joins the shards of an adapter's tensors file for a push or a check. Servers accept one file."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from loramux.adapter_store.formats.files.file_names import CONFIG_FILE, TENSORS_FILE
from loramux.adapter_store.formats.packed.sharded_tensors import INDEX_FILE, MAX_INDEX_BYTES, ShardIndex, join_shards
from loramux.admin.client.given_files import is_given


@contextmanager
def joined_directory(directory: Path) -> Iterator[Path]:
    """Yield a directory with the adapter's files in which its tensors are in one file.

    This is `directory` itself unless its tensors are divided into shards. Raises AdapterRejected for shards that cannot
    be joined.
    """
    is_divided = is_given(directory / CONFIG_FILE) and not is_given(directory / TENSORS_FILE)
    index = _index_of(directory) if is_divided else None
    if index is None:
        yield directory
        return
    with tempfile.TemporaryDirectory() as scratch:
        joined = Path(scratch)
        join_shards(index, directory, joined / TENSORS_FILE)
        for path in directory.iterdir():
            if path.name != INDEX_FILE and path.name not in index.shards:
                (joined / path.name).symlink_to(path.absolute())
        yield joined


def _index_of(directory: Path) -> ShardIndex | None:
    path = directory / INDEX_FILE
    if not is_given(path):
        return ShardIndex.of_names([found.name for found in directory.iterdir()])
    with path.open("rb") as file:
        return ShardIndex.parse(file.read(MAX_INDEX_BYTES + 1))
