"""Checks the structured-output constraints of requests in a confined process."""
