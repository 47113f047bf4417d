"""Products of adapters' matrices, read from the pool's pages on a GPU."""
