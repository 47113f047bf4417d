"""Every kernel in plain PyTorch: the specification and the test oracle."""
