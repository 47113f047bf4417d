"""Resident adapters: loading, pinning and table slots."""
