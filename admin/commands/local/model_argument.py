"""Base models that a command is given by a path or by a URL."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from loramux.admin.commands.output import error_document, fail
from loramux.admin.exit_codes import REFUSED, WRONG_CALL
from loramux.admin.server.settings import ModelSettings, SettingsError, load_settings

if TYPE_CHECKING:
    from loramux.adapter_store.pulling.model_cache import PulledModel


def model_settings(config: Path | None, data_dir: Path | None, as_json: bool) -> ModelSettings:
    """Read the settings with which models are pulled and found. Exits if they cannot be used."""
    try:
        return load_settings(ModelSettings, {"config": config, "data_dir": data_dir})
    except SettingsError as error:
        fail(str(error), WRONG_CALL, error_document(str(error), "wrong_settings") if as_json else None)


def local_model_path(model: str, config: Path | None, data_dir: Path | None, as_json: bool) -> Path:
    """Return the path of a model. Exits if a URL names a model that has not been pulled."""
    from loramux.adapter_store.errors import PullRefused
    from loramux.adapter_store.pulling.model_name import is_model_url
    from loramux.admin.server.pulled_model import local_path

    if not is_model_url(model):
        return Path(model)
    try:
        return local_path(model, model_settings(config, data_dir, as_json))
    except PullRefused as error:
        document = error_document(error.message, error.code, error.param) if as_json else None
        fail(error.message, REFUSED, document)


def existing_path(model: str, data_dir: Path | None, as_json: bool, hint: str) -> Path:
    """Return the path of a model or an adapter. Raises BadParameter if there is nothing."""
    path = local_model_path(model, None, data_dir, as_json)
    # Unlike Path.exists, this also answers for a name that is too long.
    if not os.path.exists(path):
        raise typer.BadParameter(f"there is no directory or file {path}", param_hint=hint)
    return path


def model_document(model: PulledModel) -> dict[str, object]:
    """Describe a pulled model in JSON."""
    return {
        "object": "model",
        "model": model.name.url,
        "commit": model.record.commit,
        "revisions": list(model.revisions),
        "num_bytes": model.num_bytes,
        "pulled_s": model.record.pulled_s,
        "path": str(model.path),
    }
