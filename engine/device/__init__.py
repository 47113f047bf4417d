"""CPU and CUDA backends, and detection of device failures."""
