"""Finds or pulls a base model for a Python program."""

from __future__ import annotations

import os
from pathlib import Path

from loramux.adapter_store.pulling.model_name import ModelName, is_model_url


def model_path(model: str | Path) -> Path:
    """Return a path as it is, and for a URL the path of the model, which is pulled if it is not here.

    The environment says where models are and how they are pulled. Raises PullRefused, another Refused or
    SourceUnavailable.
    """
    if isinstance(model, Path) or not is_model_url(model):
        return Path(model)
    # Most programs give a path, and need no HTTP client.
    from loramux.adapter_store.pulling.pull import Puller
    from loramux.adapter_store.pulling.pull_settings import PullSettings

    name = ModelName.parse(model)
    puller = Puller(PullSettings.choose(os.environ))
    found = puller.cache.find(name)
    return (found or puller.carry_out(puller.plan(name))).path
