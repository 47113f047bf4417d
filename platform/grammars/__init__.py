"""Structured output: the constraints in request bodies, checked in a confined process."""
