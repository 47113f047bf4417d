"""Decides which sequences run in the next step: fairness, grants and limits."""
