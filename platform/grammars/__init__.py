"""Grammars of requests: what a body asks for, checked in a confined process."""
