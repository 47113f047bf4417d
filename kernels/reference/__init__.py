"""Every kernel in plain PyTorch: the specification, and the oracle of the tests."""
