"""Metrics and traces of a gateway."""
