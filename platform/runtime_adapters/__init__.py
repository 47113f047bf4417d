"""Adapters that tenants' programs, such as trainers, load and unload while the server runs."""
