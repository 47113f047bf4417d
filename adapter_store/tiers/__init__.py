"""Tiers of packed adapters on disk and in host memory, and the staging process that loads adapters."""
