"""CPU and CUDA backends, and how device failures are recognised."""
