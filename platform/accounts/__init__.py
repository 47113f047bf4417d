"""Tenants, API keys, callers, and what a model name means to them."""
