"""Packed adapters on disk and in host memory, and the staging process that loads them."""
