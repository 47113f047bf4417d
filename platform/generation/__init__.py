"""A running request, from its submission to the engine to its settlement."""
