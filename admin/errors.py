"""Why a server does not start."""

from __future__ import annotations


class StartRefused(Exception):
    """The server cannot start; the message says why and how to fix it."""
