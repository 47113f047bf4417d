"""Converts between token ids and text."""
