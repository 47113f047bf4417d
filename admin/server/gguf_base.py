"""Replaces a GGUF model in a server's settings by its model directory."""

from __future__ import annotations

from typing import TypeVar

from loramux.adapter_store.gguf.base_directory import is_gguf, model_name
from loramux.admin.errors import StartRefused
from loramux.admin.server.data_directory import DataDirectory
from loramux.admin.server.settings import Settings
from loramux.engine.architectures.gguf_model import model_directory
from loramux.engine.protocol.errors import ModelNotSupported

SettingsT = TypeVar("SettingsT", bound=Settings)


def with_model_directory(settings: SettingsT) -> SettingsT:
    """Return settings whose `model`, a path, is a directory. A GGUF model keeps its own name. Raises StartRefused."""
    if not is_gguf(settings.model_dir):
        return settings
    try:
        directory = model_directory(settings.model_dir, DataDirectory(settings.data_dir).gguf.absolute())
    except ModelNotSupported as error:
        raise StartRefused(str(error)) from error
    name = settings.served_name or model_name(settings.model_dir)
    return settings.model_copy(update={"model": directory, "served_name": name})
