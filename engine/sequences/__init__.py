"""Sequences, their caches' pages, their timers, and the rows of a step."""
