"""Reaching an engine process and supervising it."""
