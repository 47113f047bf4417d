"""Assembles and runs servers and gateways."""
