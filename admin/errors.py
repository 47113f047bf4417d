"""The error that stops a server from starting."""

from __future__ import annotations


class StartRefused(Exception):
    """The server cannot start; the message says why and how to fix it."""
