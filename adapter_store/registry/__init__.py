"""SQL for adapters and versions, and the resolution of model names."""
