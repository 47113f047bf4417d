"""`loramux doctor`: what does not work, and how to mend it."""
