"""Checks in a sandboxed process whether uploaded files form an adapter for the base model."""
