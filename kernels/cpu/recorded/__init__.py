"""The CPU kernels as operations of a recorded program."""
