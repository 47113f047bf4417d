"""Checks in a sandboxed process whether uploaded files are an adapter of the base."""
