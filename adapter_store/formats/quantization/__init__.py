"""Readers of base models whose weights are quantised."""
