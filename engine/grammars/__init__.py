"""Grammars that constrain which tokens a sequence may choose."""
