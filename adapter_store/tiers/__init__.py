"""Packed adapters on the disk and in host memory, and the staging process that brings them there."""
