"""Quota policies, their counters, and the checks of requests against both."""
