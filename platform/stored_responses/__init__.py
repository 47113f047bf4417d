"""Responses, chat completions and conversations that are kept for tenants, encrypted, until they expire."""
