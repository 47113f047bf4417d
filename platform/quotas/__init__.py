"""Quota policies, their counters, and the check of requests against them."""
