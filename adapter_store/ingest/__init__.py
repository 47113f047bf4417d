"""Turns uploads into validated versions, or rejects them."""
