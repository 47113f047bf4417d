"""Reads repositories of a Hugging Face hub, bounded in time and memory."""
