"""Fetches base models from a hub or a bucket into a directory of this machine, from which they are then served."""
