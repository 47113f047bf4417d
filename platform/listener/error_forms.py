"""Chooses the form of a request's errors: Anthropic's clients receive Anthropic's."""

from __future__ import annotations

from starlette.datastructures import Headers
from starlette.types import Scope

from loramux.platform.messages_api.api_version import HEADER
from loramux.platform.messages_api.message_errors import MESSAGE_ERRORS
from loramux.platform.requests.error_responses import OPENAI_ERRORS, ErrorForm

MESSAGES = "/v1/messages"
MODELS = "/v1/models"
"""Path that clients of both APIs call."""


def error_form(scope: Scope) -> ErrorForm:
    path: str = scope["path"]
    if _is_at(path, MESSAGES) or (_is_at(path, MODELS) and HEADER in Headers(scope=scope)):
        return MESSAGE_ERRORS
    return OPENAI_ERRORS


def _is_at(path: str, root: str) -> bool:
    return path == root or path.startswith(f"{root}/")
