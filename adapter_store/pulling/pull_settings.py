"""How models are pulled: to where, from which hub, with which token."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from loramux.adapter_store.errors import PullRefused
from loramux.adapter_store.hub.hub_client import ENDPOINT
from loramux.adapter_store.hub.hub_transport import is_trusted_endpoint

MODELS = "models"
"""Name of the directory of pulled models in a data directory."""

DEFAULT_DATA_DIR = "loramux-data"


@dataclass(frozen=True, slots=True)
class PullSettings:
    """`token` is sent only to `endpoint`. With `is_offline`, no connection is made."""

    models_dir: Path
    endpoint: str = ENDPOINT
    token: str | None = None
    is_offline: bool = False

    @classmethod
    def choose(
        cls,
        environment: Mapping[str, str],
        *,
        data_dir: Path | None = None,
        models_dir: Path | None = None,
        endpoint: str | None = None,
        token: str | None = None,
        is_offline: bool = False,
    ) -> PullSettings:
        """Fill what is not given from LORAMUX_* variables, and then from those of Hugging Face's own tools.

        Raises PullRefused if a token or a hash could be read or changed on the way to the hub.
        """
        data_dir = data_dir or Path(environment.get("LORAMUX_DATA_DIR") or DEFAULT_DATA_DIR)
        given_models = models_dir or environment.get("LORAMUX_MODELS_DIR")
        endpoint = endpoint or _first(environment, "LORAMUX_HF_ENDPOINT", "HF_ENDPOINT") or ENDPOINT
        if not is_trusted_endpoint(endpoint):
            message = f"the hub {endpoint!r} is neither an https URL nor a URL of this machine: change HF_ENDPOINT"
            raise PullRefused("source_not_trusted", message)
        token = token or _first(environment, "LORAMUX_HF_TOKEN", "HF_TOKEN", "HUGGING_FACE_HUB_TOKEN")
        token = token.strip() if token else None
        if token is not None and not (token.isascii() and token.isprintable()):
            raise PullRefused("source_not_trusted", "HF_TOKEN must contain only printable ASCII characters")
        offline = is_offline or any(
            environment.get(name, "").upper() in ("1", "ON", "YES", "TRUE")
            for name in ("LORAMUX_HF_OFFLINE", "HF_HUB_OFFLINE")
        )
        return cls(Path(given_models or data_dir / MODELS).absolute(), endpoint, token or None, offline)


def _first(environment: Mapping[str, str], *names: str) -> str | None:
    return next((environment[name] for name in names if environment.get(name)), None)
