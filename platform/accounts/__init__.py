"""Tenants, API keys, callers, and the resolution of model names."""
