"""Servers that share requests: how they find one another, and how one forwards a request to another's engine."""
