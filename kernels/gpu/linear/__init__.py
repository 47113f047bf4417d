"""Products of a base's quantised weights on a GPU. cuBLAS multiplies by unquantised ones."""
