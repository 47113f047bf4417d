"""Sequences, their caches' pages, their deadlines, and the rows of a step."""
