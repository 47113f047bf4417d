"""Measures an OpenAI API under load."""
