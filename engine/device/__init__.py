"""What a CPU and a CUDA GPU each provide, and how their failures are recognised."""
