"""Quantises a float base model at startup."""
