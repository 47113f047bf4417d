"""`loramux check`: tells whether a base model or an adapter would be served."""
