"""Code for vector, matrix and integer instructions, which the kernels are made of."""
