"""Servers that share requests: how they find one another and forward requests to one another's engines."""
