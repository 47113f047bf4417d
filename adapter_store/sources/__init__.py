"""Adapter files that the server fetches itself, from the places that its operator allows."""
