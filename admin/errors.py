"""The error that stops a server from starting."""

from __future__ import annotations


class StartRefused(Exception):
    """The server cannot start. The message says why and how to fix it."""
