"""Makes PEFT's two files of an adapter for a push or a check: joins its shards, or converts it from mlx-lm's format."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from loramux.adapter_store.formats.files.file_names import CONFIG_FILE, MLX_FILE, TENSORS_FILE
from loramux.adapter_store.formats.mlx.base_facts import ReadBase
from loramux.adapter_store.formats.mlx.conversion import convert_mlx
from loramux.adapter_store.formats.packed.sharded_tensors import INDEX_FILE, MAX_INDEX_BYTES, ShardIndex, join_shards
from loramux.admin.client.given_files import is_given


@contextmanager
def peft_directory(directory: Path, read_base: ReadBase) -> Iterator[Path]:
    """Yield a directory with the adapter's files, in PEFT's format and with its tensors in one file.

    This is `directory` itself unless its tensors are divided into shards or were written by mlx-lm. `read_base` is
    called for some files of mlx-lm. Raises AdapterRejected for files that cannot be joined or converted.
    """
    is_mlx = is_of_mlx(directory)
    is_complete = not is_given(directory / CONFIG_FILE) or is_given(directory / TENSORS_FILE)
    index = None if is_complete or is_mlx else _index_of(directory)
    if index is None and not is_mlx:
        yield directory
        return
    with tempfile.TemporaryDirectory() as scratch:
        made = Path(scratch)
        replaced = {CONFIG_FILE, MLX_FILE}
        if index is None:
            convert_mlx(directory, made, read_base)
        else:
            join_shards(index, directory, made / TENSORS_FILE)
            replaced = {INDEX_FILE, *index.shards}
        for path in directory.iterdir():
            if path.name not in replaced:
                (made / path.name).symlink_to(path.absolute())
        yield made


def is_of_mlx(directory: Path) -> bool:
    """Return whether mlx-lm wrote the adapter's files."""
    has_config, has_mlx, has_peft = (is_given(directory / name) for name in (CONFIG_FILE, MLX_FILE, TENSORS_FILE))
    return has_config and has_mlx and not has_peft


def _index_of(directory: Path) -> ShardIndex | None:
    path = directory / INDEX_FILE
    if not is_given(path):
        return ShardIndex.of_names([found.name for found in directory.iterdir()])
    with path.open("rb") as file:
        return ShardIndex.parse(file.read(MAX_INDEX_BYTES + 1))
