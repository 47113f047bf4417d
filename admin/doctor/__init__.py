"""`loramux doctor`: reports what does not work and how to fix it."""
