"""Turns uploads into validated versions in service, or refuses them."""
