"""Recorded programs: the kernels of a whole step, run by one call and by all threads together."""
