"""Responses and chat completions that are kept for tenants, encrypted, until they expire or are deleted."""
