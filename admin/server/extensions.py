"""Every kind of extension, and the check of all installed extensions when a server starts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import structlog

from loramux.adapter_store.blobs.blob_url import BLOB_STORES
from loramux.adapter_store.extensions import Extension, ExtensionKind, ExtensionRefused
from loramux.adapter_store.formats.quantization.base_format import CHECKPOINT_FORMATS
from loramux.adapter_store.sources.adapter_sources import ADAPTER_SOURCES
from loramux.admin.errors import StartRefused
from loramux.engine.pages.eviction import EVICTION_POLICIES
from loramux.platform.accounts.key_authentication import KEY_AUTHENTICATION
from loramux.platform.routing.routers import ROUTERS
from loramux.platform.tool_calls.parsers import TOOL_PARSERS

KINDS: tuple[ExtensionKind[Any], ...] = (
    BLOB_STORES,
    EVICTION_POLICIES,
    ROUTERS,
    TOOL_PARSERS,
    ADAPTER_SOURCES,
    CHECKPOINT_FORMATS,
    KEY_AUTHENTICATION,
)

_log = structlog.get_logger(__name__)


def load_extensions(kinds: Sequence[ExtensionKind[Any]] = KINDS) -> list[Extension]:
    """Import all installed extensions and log each. Raises StartRefused if one of them cannot be used.

    A server checks the extensions that it does not use, too, because a setting or an adapter can name them later.
    """
    try:
        loaded = [extension for kind in kinds for extension in kind.load_all()]
    except ExtensionRefused as error:
        raise StartRefused(str(error)) from error
    for extension in loaded:
        _log.info("extension_loaded", kind=extension.kind, name=extension.name, distribution=extension.distribution)
    return loaded
