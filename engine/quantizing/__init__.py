"""Quantises a float base model at the start."""
