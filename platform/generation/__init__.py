"""Runs requests, from submission to the engine to settlement."""
