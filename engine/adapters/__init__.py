"""Resident adapters: loading, pinning, their slots in the tables."""
