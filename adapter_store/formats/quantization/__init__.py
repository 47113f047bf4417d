"""Readers of quantised base models."""
