"""Connecting to an engine process and supervising it."""
