"""The header with which a client says that it speaks Anthropic's API, and in which version."""

from __future__ import annotations

from starlette.datastructures import Headers

from loramux.platform.errors import InvalidRequest

HEADER = "anthropic-version"
VERSIONS = ("2023-06-01", "2026-10-21")
"""The supported versions (https://platform.claude.com/docs/en/api/versioning).

The newer version only removes parameters and contents of messages. This server accepts `temperature`, `top_p` and
`top_k` in both.
"""


def check_version(headers: Headers) -> None:
    """Raise InvalidRequest if the header is missing or names another version."""
    version = headers.get(HEADER)
    if version is None:
        raise InvalidRequest(f"{HEADER}: header is required", param=HEADER, code="missing_required_parameter")
    if version.strip() not in VERSIONS:
        known = " and ".join(VERSIONS)
        raise InvalidRequest(f"{HEADER}: {version[:64]!r} is not supported, only {known}", param=HEADER)
