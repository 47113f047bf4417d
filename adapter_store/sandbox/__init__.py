"""Processes that read untrusted input: confined, forked for each request, and shared fairly between tenants."""
