"""Configurations and weight files of the served architectures, read from a Hugging Face directory without torch."""
