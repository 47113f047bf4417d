"""Runs requests in the engine and settles them."""
