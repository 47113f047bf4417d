"""Chooses the replica that runs a request. Pure Python without I/O."""
