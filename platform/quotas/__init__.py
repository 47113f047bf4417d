"""Quota policies, their counters, and how a request is judged by them."""
