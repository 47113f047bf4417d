"""`loramux doctor`: what does not work, and how to fix it."""
