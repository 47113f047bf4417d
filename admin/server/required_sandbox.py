"""The setting `sandbox = "required"`."""

from __future__ import annotations

from loramux.adapter_store.errors import ValidationFailed
from loramux.adapter_store.validation.validator import check_sandbox
from loramux.admin.errors import StartRefused
from loramux.admin.server.settings import Settings


def require_sandbox(settings: Settings) -> None:
    """Raise StartRefused if this machine lacks an essential measure of the sandbox and the setting requires it."""
    if settings.sandbox == "required":
        try:
            check_sandbox()
        except ValidationFailed as error:
            raise StartRefused(str(error)) from error
