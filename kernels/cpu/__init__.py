"""The CPU kernels, compiled by numba."""
