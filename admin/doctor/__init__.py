"""`loramux doctor`: reports problems and how to fix them."""
