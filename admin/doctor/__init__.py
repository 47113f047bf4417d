"""`loramux doctor`: reports problems and their fixes."""
