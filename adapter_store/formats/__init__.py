"""Adapter files: safetensors, the canonical form, and the packed pages."""
