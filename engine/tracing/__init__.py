"""Spans of traced requests inside the engine."""
